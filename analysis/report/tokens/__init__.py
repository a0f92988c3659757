"""Responses in a report: token by token, and the same prompt over time."""
