"""Runs as a whole: executing, repeating, comparing."""
