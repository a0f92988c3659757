"""Optimizers: one step, the same bits under every layout."""
