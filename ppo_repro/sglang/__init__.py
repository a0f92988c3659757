"""Sampling with SGLang servers: the trainer's side. `plugin` is the part that runs inside the servers."""
