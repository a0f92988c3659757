"""Implement the commands of `ppo-repro analyse`, one file each: options, and what is printed of the analysis."""
