"""The exact numerics inside SGLang, through its own plugin mechanism; read `register` first.

Only SGLang's processes import this package. The trainer's side is `ppo_repro.rollout.sglang`.
"""
