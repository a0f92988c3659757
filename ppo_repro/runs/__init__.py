"""Runs as a whole: executing, resuming, repeating and checking them."""
