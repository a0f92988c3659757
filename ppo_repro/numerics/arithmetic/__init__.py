"""The definition of every number: grids, exact sums, elementary functions."""
