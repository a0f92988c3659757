"""OpenRLHF's actor status: token means of each step, averaged over steps.

Assumed: one process and one micro-batch per minibatch.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.clipping.update_rows import IterationRows
from analysis.dialects.definition import Definition, Source
from analysis.dialects.steps import exp, mean, one_row, policy_steps

_LOSS = Source("OpenRLHF/OpenRLHF", "openrlhf/models/loss.py", "f5b3f08a05fd6cbd9a5b712ed931bbb72c24f2c4")
_ACTOR = Source("OpenRLHF/OpenRLHF", "openrlhf/trainer/ray/ppo_actor.py", "c250c21a72176720e11aaf4fedcd6cf853d3df8b")
_STEPS = "token mean, then mean over all steps"

DEFINITIONS = (
    Definition(
        "ppo_clip_ratio", _LOSS, "mean(clip(r) A < r A)", "old", _STEPS, "grad_zero without dual clip, also with one"
    ),
    Definition("ppo_kl", _LOSS, "mean(p - n)", "old", _STEPS, "k1 of KL(old || new), any sign"),
    Definition(
        "vllm_kl",
        _ACTOR,
        "mean(g - p)",
        "old and rollout",
        _STEPS,
        "k1 of KL(rollout || old); logged only with the importance correction; formula read in a derived copy",
    ),
    Definition("entropy_loss", _ACTOR, "mean(entropy of the new policy)", "none", _STEPS, "none"),
)


def metrics(item: IterationRows) -> pd.DataFrame:
    """One row: OpenRLHF's keys for this iteration."""
    values: dict[str, list[float]] = {definition.key: [] for definition in DEFINITIONS}
    for step in policy_steps(item):
        ratio = exp(step.new - step.old)
        bounded = np.clip(ratio, 1.0 - item.rule.low, 1.0 + item.rule.high)
        values["ppo_clip_ratio"].append(float((bounded * step.advantages < ratio * step.advantages).mean()))
        values["ppo_kl"].append(float((step.old - step.new).mean()))
        values["vllm_kl"].append(float((step.rollout - step.old).mean()))
        values["entropy_loss"].append(float(step.new_entropies.mean()))
    return one_row(item, {key: mean(values) for key, values in values.items()})
