"""Ablations: grid files, and the table that reads them."""
