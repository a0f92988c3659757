"""Recorded runs computed again from their records alone: no model, no prompt, no forward pass."""
