"""Sample responses: the requests to an engine, the built-in engine, and its counter-based sampler."""
