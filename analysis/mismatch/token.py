"""Mismatch of single tokens: how two log-probs of the same token differ.

delta = logprobs_b - logprobs_a in float64 (exact to a rounding of 2**-53), rho = exp(delta); a sampled the token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.pairs.places import PLACES
from analysis.pairs.runs import OPTIONAL, REQUIRED

# of p = exp(logprobs_a); a bucket includes its lower edge, the last one also 1 and more
PROB_EDGES = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 0.5, 0.9, 0.99, 1.0)
# nats
ENTROPY_EDGES = (0.0, 0.01, 0.1, 0.3, 1.0, 2.0, 4.0, np.inf)
# near log-prob 0, neighbouring float32 are so close that a ULP says nothing; below this |log-prob| it is not reported
ULP_FLOOR = 1e-2


def ordered_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Integers in the order of the float32 values, neighbours one apart; 0 for both zeros."""
    bits = np.ascontiguousarray(values).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def ulp_distance(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Number of float32 steps between two finite numbers, int64."""
    return np.abs(ordered_bits(a) - ordered_bits(b))


def unequal_bits(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Where two float32 arrays differ in any bit."""
    different = np.ascontiguousarray(a).view(np.int32) != np.ascontiguousarray(b).view(np.int32)
    return np.asarray(different, dtype=bool)


def bucket_of(values: npt.NDArray[np.float64], edges: tuple[float, ...]) -> npt.NDArray[np.int8]:
    """The bucket [edge, next edge) of each value: 0 also below the first edge, the last also above it; NaN: -1."""
    buckets = np.clip(np.searchsorted(np.array(edges), values, side="right") - 1, 0, len(edges) - 2)
    return np.where(np.isnan(values), -1, buckets).astype(np.int8)


def mismatch_token(chunk: pd.DataFrame) -> pd.DataFrame:
    """One row per token: the columns of the chunk and

    delta, abs_delta (nats), rho = exp(delta), prob_diff = exp(logprobs_b) - exp(logprobs_a), k2 = delta^2 / 2,
    k3 = expm1(delta) - delta (float64; k1 is -delta), ulp (int64), bitwise_equal, finite (bool), prob_bucket,
    entropy_bucket (int8, -1 without an entropy). k1 and k3 estimate KL(a || b) without bias (Schulman,
    "Approximating KL divergence", 2020).

    Where a log-prob is not finite, `finite` is false, ulp and the buckets are -1, and the rest follows IEEE
    arithmetic; no value is replaced. rho is infinite where delta > 709.
    """
    a32 = chunk["logprobs_a"].to_numpy()
    b32 = chunk["logprobs_b"].to_numpy()
    a, b = a32.astype(np.float64), b32.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    # infinite and NaN values are marked by `finite`, or are ratios beyond float64
    with np.errstate(over="ignore", invalid="ignore"):
        delta = b - a
        prob_a = np.exp(a)
        table = {
            "delta": delta,
            "abs_delta": np.abs(delta),
            "rho": np.exp(delta),
            "prob_diff": np.exp(b) - prob_a,
            "k2": 0.5 * delta * delta,
            "k3": np.expm1(delta) - delta,
        }
    entropies = chunk["entropies"].to_numpy().astype(np.float64) if "entropies" in chunk else np.full(len(a), np.nan)
    table["ulp"] = np.where(finite, ulp_distance(a32, b32), -1)
    table["bitwise_equal"] = ~unequal_bits(a32, b32)
    table["finite"] = finite
    table["prob_bucket"] = np.where(finite, bucket_of(prob_a, PROB_EDGES), np.int8(-1))
    table["entropy_bucket"] = np.where(finite, bucket_of(entropies, ENTROPY_EDGES), np.int8(-1))
    columns = [name for name in (*REQUIRED, *OPTIONAL, *PLACES) if name in chunk]
    return pd.concat([chunk[columns], pd.DataFrame(table, index=chunk.index)], axis=1)


def sequence_starts(tokens: pd.DataFrame) -> npt.NDArray[np.intp]:
    """Index of the first row of every sequence; rows are in order, so a sequence is a run of equal keys."""
    keys = tokens[["iteration", "sequence"]].to_numpy()
    new = np.ones(len(keys), dtype=bool)
    new[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    return np.flatnonzero(new)
