"""Deliberate mismatches, around the sampler and around the trainer's rollout; the loop does not know them."""
