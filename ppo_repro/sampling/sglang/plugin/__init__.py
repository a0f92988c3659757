"""Run deterministic numerics inside SGLang, through SGLang's plugin mechanism; read `register` first.

Only SGLang's processes import the whole package. The trainer's side, `ppo_repro.sampling.sglang`, imports `names` and
`kept_tokens`.
"""
