"""How much of the gradient does each token carry: surrogate mass, and the norm of its gradient in the logits."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.clipping.flags import ratios_of
from analysis.clipping.update_rows import Float64, column
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import UserError


def logit_step(probabilities: Float64, prob_sq_sums: Float64) -> Float64:
    """1 - 2 p + sum_v pi_v^2 = ||e_a - pi||^2, float64: the squared norm of the gradient of log pi_a in the logits.

    A step of 1 along that gradient adds as much to log pi_a, to first order.
    """
    # (1 - p)^2 is a lower bound; only rounding of the recorded float32 columns goes below it
    return np.maximum(1.0 - 2.0 * probabilities + prob_sq_sums, (1.0 - probabilities) ** 2)


def loss_weights(rows: pd.DataFrame, config: RunConfig) -> Float64:
    """The weight of each row's surrogate in the loss of its step: aggregation times importance weight, float64.

    token_mean: 1 / tokens of the step; sequence_mean: 1 / (sequences length); sequence_sum: 1 / sequences. The
    importance weight is min(w, cap) if truncated, and if masked w within [1 / cap, cap] and 0 outside, with
    w = pi_old / pi_rollout of the token or of its response.
    """
    step = rows.groupby(["epoch", "minibatch"], sort=False)
    sequence = rows.groupby(["epoch", "minibatch", "sequence"], sort=False)
    tokens = step["position"].transform("size").to_numpy(np.float64)
    lengths = sequence["position"].transform("size").to_numpy(np.float64)
    sequences = step["sequence"].transform("nunique").to_numpy(np.float64)
    by_kind = {
        "token_mean": 1.0 / tokens,
        "sequence_mean": 1.0 / (sequences * lengths),
        "sequence_sum": 1.0 / sequences,
    }
    if config.ppo.aggregation not in by_kind:
        kinds = ", ".join(by_kind)
        raise UserError(f"ppo.aggregation = {config.ppo.aggregation}: the clip analyses know {kinds}")
    weights = by_kind[config.ppo.aggregation]
    correction = config.ppo.importance_weights
    if correction is None:
        return weights
    delta = column(rows, "old_logprobs") - column(rows, "rollout_logprobs")
    if correction.level == "sequence":
        codes = sequence.ngroup().to_numpy()
        delta = np.asarray(np.bincount(codes, delta)[codes], dtype=np.float64)
    importance = ratios_of(delta)
    if correction.kind == "truncated":
        return weights * np.minimum(importance, correction.cap)
    inside = (importance >= 1.0 / correction.cap) & (importance <= correction.cap)
    return weights * np.where(inside, importance, 0.0)


def masses(rows: pd.DataFrame, config: RunConfig) -> pd.DataFrame:
    """Per row of a policy step, float64, as if nothing were clipped.

    surrogate_mass = w |r A|, w from `loss_weights`; logit_grad_norm = w |r A| sqrt(1 - 2 p + sum pi^2), with p and pi
    of the policy before the update, for which the sum of squares is recorded.
    """
    surrogate = loss_weights(rows, config) * np.abs(ratios_of(column(rows, "log_ratios")) * column(rows, "advantages"))
    probabilities = np.exp(column(rows, "old_logprobs"))
    norm = surrogate * np.sqrt(logit_step(probabilities, column(rows, "prob_sq_sums")))
    return pd.DataFrame({"surrogate_mass": surrogate, "logit_grad_norm": norm}, index=rows.index)
