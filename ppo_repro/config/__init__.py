"""All fields that a user can set."""
