"""The stages of one iteration, each a function from the stages before it to the next frozen type."""
