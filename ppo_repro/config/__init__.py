"""Every field a user can set."""
