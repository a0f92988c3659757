"""Benchmarks: each module is a command that measures something beside its alternatives, in one run, as ratios."""
