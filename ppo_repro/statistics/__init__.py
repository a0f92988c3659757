"""Compute statistics of log-probs that runs, checks and analyses share: KL, draws, bits. Nothing here imports torch."""
