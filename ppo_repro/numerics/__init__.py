"""Exact numerics: sums that do not depend on their order, and elementwise operations written out."""
