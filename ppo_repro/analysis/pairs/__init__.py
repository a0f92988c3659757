"""Where do the two log-probs of a token come from? Recorded runs or dumps of other stacks, as frames of one shape."""
