"""How far two log-probs of the same tokens are apart, where, and what it costs."""
