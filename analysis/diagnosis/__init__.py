"""Which fault explains a mismatch of two log-probs."""
