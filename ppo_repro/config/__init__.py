"""Define all fields that a user can set."""
