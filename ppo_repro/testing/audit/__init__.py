"""Which side of another stack is wrong: its log-probs beside those of the unmodified model in float64."""
