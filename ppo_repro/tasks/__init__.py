"""Prompts with answers that can be checked, reward functions, tokenizers."""
