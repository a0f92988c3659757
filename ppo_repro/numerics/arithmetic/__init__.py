"""The definition of every number: grids, exact sums, elementary functions. Eager torch, on any device."""
