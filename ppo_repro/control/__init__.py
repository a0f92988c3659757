"""PPO on Gymnasium environments: the mathematics of `ppo/` on small networks, recorded as language runs are."""
