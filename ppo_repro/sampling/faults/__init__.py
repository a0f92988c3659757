"""Add deliberate faults to the sampler and to the trainer's rollout; the loop does not know them."""
