"""Tables and figures of a grid of runs."""
