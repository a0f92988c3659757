"""Exact matrix products on the AMX tiles of a CPU."""
