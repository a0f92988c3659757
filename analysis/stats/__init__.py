"""Statistics that do not know what they are about."""
