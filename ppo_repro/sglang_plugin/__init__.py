"""The exact numerics inside SGLang, through its own plugin mechanism; read `register` first.

Imported by SGLang's processes alone. The trainer's side is `ppo_repro.rollout.sglang`.
"""
