"""Measure the accuracy of deterministic numerics and of stock transformers against the model in float64."""
