"""Does PPO with a KL penalty end where its objective has its maximum? See README.md."""
