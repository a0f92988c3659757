"""Compute statistics of log-probs that runs, checks and analyses share. Nothing here imports torch."""
