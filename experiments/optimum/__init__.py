"""Measurements side by side with the alternative, in one run, as ratios. Each module is a command."""
