"""Measure the mismatch of single tokens, the difference of two log-probs of the same token.

Side a sampled the token. delta = logprobs_b - logprobs_a in float64, rho = exp(delta).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.statistics.bits import ulp_distance, unequal_bits
from ppo_repro.statistics.kl import k3


def mismatch_token(chunk: pd.DataFrame) -> pd.DataFrame:
    """Return the chunk, one row per token, with one more column for each measure of mismatch.

    float64: delta and abs_delta (nats), rho, prob_diff = exp(logprobs_b) - exp(logprobs_a), k3 of
    `statistics.kl` (nats). int64: ulp. bool: bitwise_equal, finite.

    If a log-prob is not finite, `finite` is false, ulp is -1, and the other columns follow IEEE arithmetic. rho is
    infinite for delta > 709.
    """
    a32, b32 = chunk["logprobs_a"].to_numpy(), chunk["logprobs_b"].to_numpy()
    a, b = a32.astype(np.float64), b32.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    # infinite and NaN values are marked by `finite`, or are ratios beyond float64
    with np.errstate(over="ignore", invalid="ignore"):
        delta = b - a
        return chunk.assign(
            delta=delta,
            abs_delta=np.abs(delta),
            rho=np.exp(delta),
            prob_diff=np.exp(b) - np.exp(a),
            k3=k3(delta),
            ulp=np.where(finite, ulp_distance(a32, b32), -1),
            bitwise_equal=~unequal_bits(a32, b32),
            finite=finite,
        )


def sequence_starts(tokens: pd.DataFrame) -> npt.NDArray[np.intp]:
    """Return the index of the first row of each sequence; the rows of a sequence are consecutive."""
    keys = tokens[["iteration", "sequence"]].to_numpy()
    new = np.ones(len(keys), dtype=bool)
    new[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    return np.flatnonzero(new)
