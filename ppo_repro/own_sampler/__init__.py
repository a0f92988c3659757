"""Sampling with an engine of the user's own: a Python class that gets weights and prompts, and returns responses."""
