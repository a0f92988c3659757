"""Analyses of recorded runs: they read records only and compute everything a second time."""
