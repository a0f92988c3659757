"""Mismatch of whole responses: products and geometric means of ratios, perplexities, the first difference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.mismatch.token import sequence_starts

# nats; a smaller difference of two float32 forwards is rounding
DIVERGENCE_TAU = 1e-3


@dataclass(frozen=True)
class Bounds:
    """Which ratios pass, per level: [low, high] for rho itself, not for its logarithm."""

    token: tuple[float, float] = (0.5, 2.0)
    sequence: tuple[float, float] = (0.1, 10.0)
    geometric: tuple[float, float] = (0.999, 1.001)


USUAL_BOUNDS = Bounds()


def first_true(flags: npt.NDArray[np.bool_], starts: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    """Index within its sequence of the first true flag, -1 where there is none."""
    rows = len(flags)
    rows_of_true = np.where(flags, np.arange(rows), rows)
    first = np.minimum.reduceat(rows_of_true, starts) if rows else np.zeros(0, np.int64)
    ends = np.append(starts[1:], rows)
    return np.where(first < ends, first - starts, -1)


def mismatch_sequence(
    tokens: pd.DataFrame, bounds: Bounds = USUAL_BOUNDS, divergence_tau: float = DIVERGENCE_TAU
) -> pd.DataFrame:
    """One row per sequence, from `mismatch_token` rows of whole sequences. delta_t = logprobs_b - logprobs_a.

    tokens, nonfinite (tokens), log_rho_seq = sum delta, rho_geo = exp(mean delta), log_ppl_a = -mean logprobs_a,
    log_ppl_b, log_ppl_diff = log_ppl_b - log_ppl_a = -mean delta, abs_mean, abs_max, k3_mean, k3_sum,
    frac_bitwise_equal (float64); first_div_bit and first_div_tau, the positions of the first token whose bits differ
    and of the first whose |delta| > tau (Int32, missing where there is none); keep_token (every rho within
    bounds.token), keep_sequence, keep_geometric. In a sequence with a token that is not finite, sums over it are NaN
    and every keep_* is false.
    """
    starts = sequence_starts(tokens)
    lengths = np.diff(np.append(starts, len(tokens)))

    def sums(name: str) -> npt.NDArray[np.float64]:
        column = tokens[name].to_numpy().astype(np.float64)
        # inf - inf is NaN, and is meant to stay NaN
        with np.errstate(invalid="ignore"):
            return np.add.reduceat(column, starts) if len(starts) else np.zeros(0)

    rho, delta = tokens["rho"].to_numpy(), sums("delta")
    log_ppl_a, log_ppl_b = -sums("logprobs_a") / lengths, -sums("logprobs_b") / lengths
    with np.errstate(over="ignore"):
        rho_seq, rho_geo = np.exp(delta), np.exp(delta / lengths)
    inside = (rho >= bounds.token[0]) & (rho <= bounds.token[1])
    k3_sum = sums("k3")
    positions = tokens["position"].to_numpy()

    def first(flags: npt.NDArray[np.bool_]) -> pd.arrays.IntegerArray:
        index = first_true(flags, starts)
        position_of_first = positions[np.where(index < 0, 0, starts + index)].astype(np.int32)
        return pd.arrays.IntegerArray(position_of_first, index < 0)

    return pd.DataFrame(
        {
            "iteration": tokens["iteration"].to_numpy()[starts],
            "sequence": tokens["sequence"].to_numpy()[starts],
            "tokens": lengths.astype(np.int32),
            "nonfinite": lengths.astype(np.int64) - sums("finite").astype(np.int64),
            "log_rho_seq": delta,
            "rho_geo": rho_geo,
            "log_ppl_a": log_ppl_a,
            "log_ppl_b": log_ppl_b,
            "log_ppl_diff": -delta / lengths,
            "abs_mean": sums("abs_delta") / lengths,
            "abs_max": np.maximum.reduceat(tokens["abs_delta"].to_numpy(), starts) if len(starts) else np.zeros(0),
            "k3_mean": k3_sum / lengths,
            "k3_sum": k3_sum,
            "frac_bitwise_equal": sums("bitwise_equal") / lengths,
            "first_div_bit": first(~tokens["bitwise_equal"].to_numpy()),
            "first_div_tau": first(tokens["abs_delta"].to_numpy() > divergence_tau),
            "keep_token": first_true(~inside, starts) < 0,
            "keep_sequence": (rho_seq >= bounds.sequence[0]) & (rho_seq <= bounds.sequence[1]),
            "keep_geometric": (rho_geo >= bounds.geometric[0]) & (rho_geo <= bounds.geometric[1]),
        }
    )
