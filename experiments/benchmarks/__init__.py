"""Benchmarks: each module is a command that measures alternatives side by side in one run, as ratios."""
