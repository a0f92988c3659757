"""CleanRL's `losses/*`: sign-unaware clip fraction, KL of the last minibatch alone."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.clipping.update_rows import IterationRows, column
from analysis.dialects.definition import Definition, Source
from analysis.dialects.steps import exp, mean, one_row, policy_steps

_PPO = Source("vwxyzjn/cleanrl", "cleanrl/ppo.py", "020cf0e53305793c8e39f4b68f9ac1ae9099f004")
_LAST = "token mean; only the iteration's last minibatch is logged"

DEFINITIONS = (
    Definition(
        "losses/old_approx_kl", _PPO, "mean(-log r)", "rollout", _LAST, "k1 of KL(rollout || new); ours is every step"
    ),
    Definition("losses/approx_kl", _PPO, "mean((r - 1) - log r)", "rollout", _LAST, "k3; no expm1, in float32"),
    Definition(
        "losses/clipfrac",
        _PPO,
        "mean(|r - 1| > clip_coef)",
        "rollout",
        "token mean, then mean over all minibatches and epochs",
        "band_out whatever the sign of A, so also where the gradient is kept; NaN if the range is asymmetric, "
        "which CleanRL does not have; in float32 |1.2 - 1| > 0.2",
    ),
    Definition("losses/entropy", _PPO, "mean(entropy of the new policy)", "none", _LAST, "none but the minibatch"),
    Definition(
        "losses/explained_variance",
        _PPO,
        "1 - var(returns - values) / var(returns)",
        "none",
        "over the whole rollout",
        "NaN where returns do not vary, as ours",
    ),
)


def metrics(item: IterationRows) -> pd.DataFrame:
    """One row: CleanRL's keys for this iteration; its old log-probs are those of the rollout."""
    rule, last = item.rule, {"losses/old_approx_kl": float("nan")}
    clipped = []
    for step in policy_steps(item):
        log_ratios = step.new - step.rollout
        ratios = exp(log_ratios)
        clipped.append(float((np.abs(ratios - 1.0) > rule.low).mean()))
        last = {
            "losses/old_approx_kl": float((-log_ratios).mean()),
            "losses/approx_kl": float(((ratios - 1.0) - log_ratios).mean()),
            "losses/entropy": float(step.new_entropies.mean()),
        }
    values, returns = column(item.tokens, "values"), column(item.tokens, "returns")
    spread = float(np.var(returns))
    return one_row(
        item,
        {
            **last,
            "losses/clipfrac": mean(clipped) if rule.low == rule.high else float("nan"),
            "losses/explained_variance": 1.0 - float(np.var(returns - values)) / spread if spread else float("nan"),
        },
    )
