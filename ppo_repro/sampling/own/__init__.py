"""Sample with the user's engine: a Python class that receives weights and prompts, and returns responses."""
