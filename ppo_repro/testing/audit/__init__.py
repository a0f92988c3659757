"""Find the side of another stack that is wrong: compare its log-probs with the unmodified model's in float64."""
