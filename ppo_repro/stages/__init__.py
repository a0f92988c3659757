"""The stages of one iteration; each is a function from earlier stages to the next frozen type."""
