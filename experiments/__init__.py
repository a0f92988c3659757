"""Configurations, studies and benchmarks."""
