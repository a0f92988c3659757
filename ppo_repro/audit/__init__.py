"""Which side of another stack is wrong: its log-probs beside those of the exact model."""
