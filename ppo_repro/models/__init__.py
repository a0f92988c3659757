"""Policy, value model, reward model and reference: making, loading, batches, forward passes, adapters."""
