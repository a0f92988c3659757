"""Exact matrix products in float64, for any CPU."""
