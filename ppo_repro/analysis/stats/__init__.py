"""Compute statistics for analyses alone, over responses or seeds: sums, standard errors, tests, intervals, power."""
