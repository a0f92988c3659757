"""Statistics that know nothing of runs: exact sums, standard errors, tests, intervals, power."""
