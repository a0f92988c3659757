"""Every cause of wrong log-probs that the audit tries: one row for each, with the numbers that it predicts."""
