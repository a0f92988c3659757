"""Sample with the user's class, which receives weights and prompts, and returns responses."""
