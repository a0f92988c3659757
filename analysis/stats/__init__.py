"""Statistics that know nothing of runs: exact sums, tests, intervals, power, survival."""
