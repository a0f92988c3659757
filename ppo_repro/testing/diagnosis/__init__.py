"""Find the fault that explains the differences between the log-probs of sampler and trainer."""
