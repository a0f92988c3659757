"""Sampling responses: the engine protocol, the torch engine and the counter-based sampler."""
