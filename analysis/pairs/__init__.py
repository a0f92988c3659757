"""Where do the two log-probs of each token come from? Recorded runs, or dumps of other stacks, as frames of one shape."""
