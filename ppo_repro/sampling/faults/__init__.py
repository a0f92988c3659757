"""Add deliberate faults to the sampler and to the trainer's rollout. The loop does not know them."""
