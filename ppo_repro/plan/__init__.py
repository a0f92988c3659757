"""Memory of a run, worked out without loading a weight."""
