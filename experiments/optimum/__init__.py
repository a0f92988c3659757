"""Check whether PPO with a KL penalty ends at the maximum of its objective. See README.md."""
