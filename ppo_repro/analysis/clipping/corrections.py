"""Compute importance weights and rejection of each token, in float64 from recorded log-probs, without training code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ppo_repro.analysis.clipping.clip_flags import ratios_of
from ppo_repro.analysis.clipping.update_rows import Bool, Floats
from ppo_repro.config.algorithm import ImportanceWeights, Rejection
from ppo_repro.statistics.kl import k2, k3

WEIGHTLESS = ("masked_high", "masked_low", "rejected")  # the weight is 0


def ratios_at(delta: Floats, sequence: npt.NDArray[np.int64], level: str) -> Floats:
    """Return the ratio w of each token, float64, from delta = old - rollout log-prob.

    w = exp(delta) at the level `token`, exp(sum of delta over the response) at `sequence`, and exp(mean of delta over
    the response) at `geometric`. `sequence` has the response of each token.
    """
    if level == "token":
        return ratios_of(delta)
    codes = np.unique(sequence, return_inverse=True)[1]
    sums = np.asarray(np.bincount(codes, delta), dtype=np.float64)
    return ratios_of((sums / np.bincount(codes) if level == "geometric" else sums)[codes])


def weights_of(
    settings: ImportanceWeights, delta: Floats, sequence: npt.NDArray[np.int64]
) -> tuple[Floats, npt.NDArray[np.object_]]:
    """Return the importance weight of each token, float64 [N], and the change of its ratio (column `correction`).

    A ratio outside the bounds is truncated to the nearer bound, or masked: its weight is 0. With `normalize`, weights
    are divided by their mean over the tokens, or over the responses if the level is not `token`.
    """
    ratios, low, high = ratios_at(delta, sequence, settings.level), settings.lowest, settings.highest
    changes = np.full(len(ratios), "none", dtype=object)
    changes[ratios > high] = f"{settings.kind}_high"
    changes[ratios < low] = f"{settings.kind}_low"
    if settings.kind == "truncated":
        weights = np.clip(ratios, low, high)
    else:
        weights = np.where(changes == "none", ratios, 0.0)
    if settings.normalize:
        each = weights if settings.level == "token" else weights[np.unique(sequence, return_index=True)[1]]
        weights = weights / each.mean() if each.mean() > 0.0 else weights
    return weights, changes


def rejected(entry: Rejection, delta: Floats, sequence: npt.NDArray[np.int64]) -> Bool:
    """Return a bool per token: whether an entry of `ppo.rejection` rejects it. `ratios_at` describes the arguments."""
    codes = np.unique(sequence, return_inverse=True)[1]
    if entry.kind == "ratio":
        ratios = ratios_at(delta, sequence, entry.level)
        return (ratios < entry.low) | (ratios > entry.high)
    if entry.kind == "veto":
        return (np.bincount(codes, ratios_of(delta) < entry.below) > 0)[codes]
    values = k2(delta) if entry.estimator == "k2" else k3(delta)
    if entry.level == "token":
        return values > entry.above
    if entry.level == "max":
        largest = np.full(codes.max(initial=-1) + 1, -np.inf)
        np.maximum.at(largest, codes, values)
        return (largest > entry.above)[codes]
    sums = np.bincount(codes, values)
    return ((sums / np.bincount(codes) if entry.level == "mean" else sums) > entry.above)[codes]


def applied(
    importance_weights: ImportanceWeights | None,
    rejection: Sequence[Rejection],
    delta: Floats,
    sequence: npt.NDArray[np.int64],
) -> tuple[Floats, npt.NDArray[np.object_]]:
    """Apply importance weights, and then every entry of the rejection.

    Args:
        importance_weights: the section `ppo.importance_weights`; None leaves every weight 1.
        rejection: the entries of `ppo.rejection`.
        delta: [N] float64, old - rollout log-prob of each token, nats.
        sequence: [N] int64, the response of each token.

    Returns:
        The weight of each token, [N] float64, and the change of its ratio, [N] strings of the column `correction`.
    """
    weights, changes = np.ones(len(delta)), np.full(len(delta), "none", dtype=object)
    if importance_weights is not None:
        weights, changes = weights_of(importance_weights, delta, sequence)
    for entry in rejection:
        where = rejected(entry, delta, sequence)
        weights, changes = np.where(where, 0.0, weights), np.where(where, "rejected", changes)
    return weights, changes
