"""PPO on Gymnasium environments: the mathematics of `ppo/` on small networks, with the records of language runs."""
