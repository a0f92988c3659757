"""What did a grid of runs find? The outcome of each cell, and its table over seeds."""
