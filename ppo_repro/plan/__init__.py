"""The memory a run needs, computed without loading a weight."""
