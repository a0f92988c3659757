"""The user's code in Python files, and what guards a run against its mistakes."""
