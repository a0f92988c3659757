"""Two log-probs per token, from recorded runs or from dumps of other stacks."""
