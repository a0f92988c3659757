"""tinker-cookbook's `optim/*`: the policy being trained against the sampler, over a whole pass.

It makes one pass over a batch and scores each minibatch when its turn comes; here a pass is an epoch, one row each.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.clipping.update_rows import IterationRows
from analysis.dialects.definition import Definition, Source
from analysis.dialects.steps import Step, policy_steps

_METRICS = Source(
    "thinking-machines-lab/tinker-cookbook", "tinker_cookbook/rl/metrics.py", "1f656115525ddc7be21d3ade56a35071cd8d406e"
)
_FLAT = "token mean over all minibatches of a pass"

DEFINITIONS = (
    Definition(
        "optim/kl_sample_train_v1",
        _METRICS,
        "mean(g - n)",
        "new and rollout",
        _FLAT,
        "k1; mismatch and the movement within the pass together, not mismatch alone",
    ),
    Definition("optim/kl_sample_train_v2", _METRICS, "0.5 mean((g - n)^2)", "new and rollout", _FLAT, "k2; as v1"),
    Definition(
        "optim/entropy", _METRICS, "-mean(g)", "rollout", _FLAT, "from sampled tokens; ours is over the vocabulary"
    ),
)


def metrics(item: IterationRows) -> pd.DataFrame:
    """One row per epoch: tinker-cookbook's keys."""
    passes: dict[int, list[Step]] = {}
    for step in policy_steps(item):
        passes.setdefault(step.epoch, []).append(step)
    rows = []
    for epoch, steps in passes.items():
        sampled = np.concatenate([step.rollout for step in steps])
        difference = sampled - np.concatenate([step.new for step in steps])
        rows.append(
            {
                "iteration": item.iteration,
                "epoch": epoch,
                "optim/kl_sample_train_v1": float(difference.mean()),
                "optim/kl_sample_train_v2": 0.5 * float((difference**2).mean()),
                "optim/entropy": -float(sampled.mean()),
            }
        )
    return pd.DataFrame(rows)
