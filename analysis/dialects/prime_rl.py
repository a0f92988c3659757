"""prime-rl's token export, averaged over the tokens of a step: the policy being trained against the sampler."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.clipping.update_rows import IterationRows
from analysis.dialects.definition import Definition, Source
from analysis.dialects.steps import exp, policy_steps, step_rows
from ppo_repro.errors import UserError

_EXPORT = Source(
    "PrimeIntellect-ai/prime-rl", "src/prime_rl/trainer/rl/token_export.py", "d2f82fa63a75a6dbb0fe0a4c724e2578c1f850ea"
)
_LOSS = Source(
    "PrimeIntellect-ai/prime-rl", "src/prime_rl/trainer/rl/loss.py", "008468c12f3f82fd161d5928b8ff9698dfd77582"
)
_PAIR, _MEAN = "new and rollout", "token mean of a step"

DEFINITIONS = (
    Definition(
        "mismatch_kl",
        _LOSS,
        "mean(exp(x) - x - 1), x = n - g",
        _PAIR,
        _MEAN,
        "k3 of KL(rollout || new): after the first step it includes the update's movement",
    ),
    Definition("importance_ratio", _EXPORT, "mean(exp(n - g))", _PAIR, _MEAN, "none"),
    Definition("prob_delta", _EXPORT, "mean(exp(n) - exp(g))", _PAIR, _MEAN, "signed, so positive and negative cancel"),
    Definition(
        "is_masked",
        _EXPORT,
        "mean(prob_delta > high if A > 0 else prob_delta < -low)",
        _PAIR,
        _MEAN,
        "a bound on probabilities, 0.2 each by default, no ratio; with A = 0 the lower one counts here but not below",
    ),
    Definition("is_masked_high", _EXPORT, "mean(A > 0 and prob_delta > high)", _PAIR, _MEAN, "as is_masked"),
    Definition("is_masked_low", _EXPORT, "mean(A < 0 and prob_delta < -low)", _PAIR, _MEAN, "as is_masked"),
)


def metrics(item: IterationRows, mask_low: float = 0.2, mask_high: float = 0.2) -> pd.DataFrame:
    """One row per policy step: prime-rl's keys. Raises UserError for a negative bound."""
    if not (mask_low >= 0 and mask_high >= 0):
        raise UserError(f"mask_low = {mask_low:g}, mask_high = {mask_high:g}: must be 0 or more, as probabilities")
    rows = []
    for step in policy_steps(item):
        x, delta = step.new - step.rollout, np.exp(step.new) - np.exp(step.rollout)
        up, high, low = step.advantages > 0, delta > mask_high, delta < -mask_low
        numbers = {
            "mismatch_kl": float((exp(x) - x - 1.0).mean()),
            "importance_ratio": float(exp(x).mean()),
            "prob_delta": float(delta.mean()),
            "is_masked": float(np.where(up, high, low).mean()),
            "is_masked_high": float((up & high).mean()),
            "is_masked_low": float(((step.advantages < 0) & low).mean()),
        }
        rows.append((step, numbers))
    return step_rows(item, rows)
