"""What the benchmarks compare ppo_repro with: for each peer an environment, and the script that runs in it."""
