"""The stages of one iteration. Each is a function from earlier stages to the next frozen type."""
