"""Mismatches made on purpose. They wrap the sampler and what the trainer receives; the loop does not know them."""
