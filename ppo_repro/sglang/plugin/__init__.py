"""Deterministic numerics inside SGLang, through its own plugin mechanism; read `register` first.

Only SGLang's processes import all of it; the trainer's side, `ppo_repro.sglang`, imports `names` and `kept_tokens`.
"""
