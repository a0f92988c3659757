"""Peers of ppo_repro in the benchmarks: an environment for each peer, and the script that runs in it."""
