"""NeMo-RL's clipped policy-gradient loss: its keys for one step."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.clipping.update_rows import IterationRows
from analysis.dialects.definition import Definition, Source
from analysis.dialects.steps import Float64, exp, policy_steps, step_rows

_LOSS = Source("NVIDIA-NeMo/RL", "nemo_rl/algorithms/loss_functions.py", "005a098a5fc04317a0ceb792e66a8b8076804618")
_PAIR, _MEAN = "old and rollout", "token mean of a step"
_EPSILON = 1e-8  # added to the number of tokens

DEFINITIONS = (
    Definition("probs_ratio", _LOSS, "mean(r)", "old", _MEAN, "none but 1e-8 on the count"),
    Definition(
        "probs_ratio_clamped",
        _LOSS,
        "mean(clip(r))",
        "old",
        _MEAN,
        "instead of a clip fraction",
    ),
    Definition("probs_ratio_min", _LOSS, "min(r)", "old", "over the tokens of a step", "none"),
    Definition("probs_ratio_max", _LOSS, "max(r)", "old", "over the tokens of a step", "none"),
    Definition("probs_ratio_clamped_min", _LOSS, "min(clip(r))", "old", "over the tokens of a step", "none"),
    Definition("probs_ratio_clamped_max", _LOSS, "max(clip(r))", "old", "over the tokens of a step", "none"),
    Definition("token_mult_prob_error", _LOSS, "mean(exp(|g - p|))", _PAIR, _MEAN, "our mean exp(|delta|)"),
    Definition("gen_kl_error", _LOSS, "mean(exp(x) - 1 - x), x = p - g", _PAIR, _MEAN, "k3 of KL(rollout || old)"),
    Definition(
        "policy_kl_error",
        _LOSS,
        "mean(exp(-x) - 1 + x), x = p - g",
        _PAIR,
        _MEAN,
        "called KL(train || generation), but its tokens are the sampler's: it estimates chi2(g || p) - KL(g || p)",
    ),
    Definition(
        "js_divergence_error",
        _LOSS,
        "mean of k3 to the mixture, both halves on the sampled token",
        _PAIR,
        _MEAN,
        "not the Jensen-Shannon divergence: both terms use the sampler's tokens",
    ),
    Definition("sampling_importance_ratio", _LOSS, "mean(exp(p - g))", _PAIR, _MEAN, "non-finite weights become 0"),
    Definition(
        "approx_entropy",
        _LOSS,
        "-mean(exp(n - g) n)",
        "new and rollout",
        _MEAN,
        "importance-sampled from sampled tokens; ours is over the vocabulary",
    ),
)


def masked_mean(values: Float64) -> float:
    """sum / (tokens + 1e-8), the reduction of all means of NeMo-RL."""
    return float(values.sum()) / (len(values) + _EPSILON)


def metrics(item: IterationRows) -> pd.DataFrame:
    """One row per policy step: NeMo-RL's keys."""
    rows = []
    for step in policy_steps(item):
        ratio, x = exp(step.new - step.old), step.old - step.rollout
        bounded = np.clip(ratio, 1.0 - item.rule.low, 1.0 + item.rule.high)
        mixture = np.log(0.5 * np.exp(step.old) + 0.5 * np.exp(step.rollout))
        trained, sampled = step.old - mixture, step.rollout - mixture
        halves = 0.5 * (exp(trained) - trained - 1.0) + 0.5 * (exp(sampled) - sampled - 1.0)
        weights = exp(x)
        numbers = {
            "probs_ratio": masked_mean(ratio),
            "probs_ratio_clamped": masked_mean(bounded),
            "probs_ratio_min": float(ratio.min()),
            "probs_ratio_max": float(ratio.max()),
            "probs_ratio_clamped_min": float(bounded.min()),
            "probs_ratio_clamped_max": float(bounded.max()),
            "token_mult_prob_error": masked_mean(exp(np.abs(x))),
            "gen_kl_error": masked_mean(exp(x) - 1.0 - x),
            "policy_kl_error": masked_mean(exp(-x) - 1.0 + x),
            "js_divergence_error": masked_mean(halves),
            # as in NeMo-RL, a weight that is not finite counts as 0
            "sampling_importance_ratio": masked_mean(np.where(np.isfinite(weights), weights, 0.0)),
            "approx_entropy": -masked_mean(exp(step.new - step.rollout) * step.new),
        }
        rows.append((step, numbers))
    return step_rows(item, rows)
