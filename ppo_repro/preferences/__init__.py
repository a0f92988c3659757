"""Make or read pairs of responses, and train on them."""
