"""Why do sampler and trainer disagree? Which fault explains the pattern of their log-probs."""
