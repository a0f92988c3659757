"""Ablations: grid files, read with `analysis.grids`."""
