"""Executed notebooks, one for each question, and the command that executes them: `python -m analysis.notebooks`."""
