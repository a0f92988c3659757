"""Mismatches made on purpose, around the sampler and around the trainer's rollout; the loop does not know them."""
