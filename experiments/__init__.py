"""Configurations, studies and benchmarks; README.md lists the questions they answer."""
