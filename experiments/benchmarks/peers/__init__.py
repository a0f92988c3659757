"""What the benchmarks compare ppo_repro with: an environment of its own for each, and the script that runs in it."""
