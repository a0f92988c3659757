"""What did a grid of runs find? Its table over seeds, its figure, and how many distinct results one seed has."""
