"""PPO on language models whose runs are reproducible to the last bit."""

__version__ = "0.2.0"
