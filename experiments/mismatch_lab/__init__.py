"""A mismatch between sampler and trainer of one known cause at a time."""
