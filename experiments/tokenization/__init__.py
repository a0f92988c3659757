"""Does the tokenizer matter? Studies as data, and an exact table of what cannot depend on it."""
