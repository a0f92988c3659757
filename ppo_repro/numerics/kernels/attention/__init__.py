"""Attention on CPUs, forward and backward, with sums that are exact in every order."""
