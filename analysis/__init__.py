"""Notebooks about recorded runs, and the program that executes them; README.md names them."""
