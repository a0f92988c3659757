"""Sampling with SGLang servers: the trainer's side. The servers' side of the exact numerics is `sglang_plugin`."""
