"""Compute statistics of numbers: exact sums, standard errors, tests, intervals, power."""
