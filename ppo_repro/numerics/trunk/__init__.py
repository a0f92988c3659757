"""Whole forward and backward passes of a trunk, kernel after kernel."""
