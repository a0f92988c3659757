"""What tokenizer and unit do to KL."""
