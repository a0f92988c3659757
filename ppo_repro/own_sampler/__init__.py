"""Sampling with the user's engine: a Python class that gets weights and prompts, and returns responses."""
