"""Why do sampler and trainer disagree? The fault that explains the pattern of their log-probs."""
