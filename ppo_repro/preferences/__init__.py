"""Pairs of responses, and training on them."""
