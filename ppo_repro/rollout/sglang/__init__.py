"""Sampling with SGLang servers: the trainer's side. `sglang_plugin` is the part that runs inside the servers."""
