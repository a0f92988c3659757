"""Exact numerics: sums whose order does not matter, and elementary functions written out operation by operation."""
