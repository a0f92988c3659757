"""Deterministic numerics inside SGLang, through its own plugin mechanism; read `register` first.

Only SGLang's processes import more of it than `names`. The trainer's side is `ppo_repro.sglang`.
"""
