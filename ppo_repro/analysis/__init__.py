"""Analyses compute every quantity again from the records; only remedies.py calls the trainer. Start with README.md."""
