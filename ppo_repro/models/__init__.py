"""Make and load policy, value model, reward model and reference, and compute their forward passes over batches."""
