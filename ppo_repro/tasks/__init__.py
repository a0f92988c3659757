"""Prompts with verifiable answers, reward functions, tokenizers."""
