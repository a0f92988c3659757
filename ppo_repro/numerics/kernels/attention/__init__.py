"""Attention, forward and backward, in exact arithmetic."""
