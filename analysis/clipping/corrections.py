"""What importance weights and rejection do to each token, in float64 from recorded log-probs: a second computation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis.clipping.flags import ratios_of
from ppo_repro.analysis.clipping.update_rows import Bool, Float64, column
from ppo_repro.config.algorithm import ImportanceWeights, Rejection
from ppo_repro.config.run import RunConfig

WEIGHTLESS = ("masked_high", "masked_low", "rejected")  # the weight is 0


def ratios_at(delta: Float64, sequence: npt.NDArray[np.int64], level: str) -> Float64:
    """w per token: exp of delta = old - rollout, or of its sum (sequence) or mean (geometric) over the response."""
    if level == "token":
        return ratios_of(delta)
    codes = np.unique(sequence, return_inverse=True)[1]
    sums = np.asarray(np.bincount(codes, delta), dtype=np.float64)
    return ratios_of((sums / np.bincount(codes) if level == "geometric" else sums)[codes])


def bounded(ratios: Float64, kind: str, low: float, high: float) -> tuple[Float64, npt.NDArray[np.object_]]:
    """(weights, what was done): `truncated` to [low, high], or `masked` to 0 outside."""
    changes = np.full(len(ratios), "none", dtype=object)
    changes[ratios > high], changes[ratios < low] = f"{kind}_high", f"{kind}_low"
    if kind == "truncated":
        return np.clip(ratios, low, high), changes
    return np.where(changes == "none", ratios, 0.0), changes


def rejected(entry: Rejection, delta: Float64, sequence: npt.NDArray[np.int64]) -> Bool:
    """Return the tokens that an entry of ppo.rejection rejects."""
    codes = np.unique(sequence, return_inverse=True)[1]
    if entry.kind == "ratio":
        ratios = ratios_at(delta, sequence, entry.level)
        return (ratios < entry.low) | (ratios > entry.high)
    if entry.kind == "veto":
        return (np.bincount(codes, ratios_of(delta) < entry.below) > 0)[codes]
    with np.errstate(over="ignore"):
        values = delta**2 / 2.0 if entry.estimator == "k2" else np.expm1(delta) - delta
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
    delta: Float64,
    sequence: npt.NDArray[np.int64],
) -> tuple[Float64, npt.NDArray[np.object_]]:
    """(weights, what was done) of each token, by importance weights and then by every entry of the rejection."""
    weights, changes = np.ones(len(delta)), np.full(len(delta), "none", dtype=object)
    if importance_weights is not None:
        weights, changes = weights_of(importance_weights, delta, sequence)
    for entry in rejection:
        where = rejected(entry, delta, sequence)
        weights, changes = np.where(where, 0.0, weights), np.where(where, "rejected", changes)
    return weights, changes


def corrections_of(tokens: pd.DataFrame, config: RunConfig) -> pd.DataFrame:
    """weight (float64), change (as the column `correction`) and counted (bool) of the tokens of a whole iteration.

    weight: 1 without importance weights, 0 for rejected tokens; normalised weights are over their mean before
    rejection. counted: false where ppo.rejected_tokens = left_out leaves the token out of every loss.
    """
    ppo, sequence = config.ppo, tokens["sequence"].to_numpy(np.int64)
    delta = column(tokens, "old_logprobs") - column(tokens, "rollout_logprobs")
    weights, changes = applied(ppo.importance_weights, ppo.rejection, delta, sequence)
    counted = ~np.isin(changes.astype(str), WEIGHTLESS) | (ppo.rejected_tokens == "counted")
    return pd.DataFrame({"weight": weights, "change": changes, "counted": counted}, index=tokens.index)


def bounds_of(settings: ImportanceWeights) -> tuple[float, float]:
    """Return the smallest and the largest w that stay as they are."""
    cap, floor = math.inf if settings.cap is None else settings.cap, settings.floor or 0.0
    return (1.0 / cap if settings.kind == "masked" and settings.floor is None else floor), cap


def weights_of(
    settings: ImportanceWeights, delta: Float64, sequence: npt.NDArray[np.int64]
) -> tuple[Float64, npt.NDArray[np.object_]]:
    """(weight, what was done) of each token; `sequence` says which response a token belongs to."""
    weights, changes = bounded(ratios_at(delta, sequence, settings.level), settings.kind, *bounds_of(settings))
    if settings.normalize:
        each = weights if settings.level == "token" else weights[np.unique(sequence, return_index=True)[1]]
        weights = weights / each.mean() if each.mean() > 0.0 else weights
    return weights, changes
