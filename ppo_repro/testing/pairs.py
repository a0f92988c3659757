"""Frames of pairs: two log-probs of the same token in each row, and their mismatch. Never imports torch.

A frame has the columns PAIR: the place of the token, its id, and its float32 log-probs (nats) by the sampler (a) and by
the trainer (b). delta = logprobs_b - logprobs_a in float64, rho = exp(delta).
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from ppo_repro.statistics.bits import ulp_distance, unequal_bits
from ppo_repro.statistics.kl import k3
from ppo_repro.testing.dumps import DumpedResponse

KEY = ["iteration", "sequence", "position"]
PAIR = [*KEY, "token_id", "logprobs_a", "logprobs_b"]


def tokens_of(response: DumpedResponse, sequence: int) -> pd.DataFrame:
    """Return the pairs of the tokens that count, with EXTRA; token_id is -1 without tokens."""
    positions = np.flatnonzero(response.counts)
    ids = np.array(response.response_ids) if response.response_ids else np.full(len(response.counts), -1)
    lists = {"token_id": ids, "logprobs_a": response.sampler, "logprobs_b": response.trainer, **response.extra}
    columns = {name: values[positions] for name, values in lists.items()}
    return pd.DataFrame({"iteration": response.iteration, "sequence": sequence, "position": positions, **columns})


def with_mismatch(pairs: pd.DataFrame) -> pd.DataFrame:
    """Return pairs with one more column for each measure of mismatch.

    float64: delta and abs_delta (nats), rho, prob_diff = exp(logprobs_b) - exp(logprobs_a), k3 of
    `statistics.kl` (nats). int64: ulp. bool: bitwise_equal, finite.

    If a log-prob is not finite, `finite` is false, ulp is -1, and the other columns follow IEEE arithmetic. rho is
    infinite for delta > 709.
    """
    a32, b32 = pairs["logprobs_a"].to_numpy(), pairs["logprobs_b"].to_numpy()
    a, b = a32.astype(np.float64), b32.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    # infinite and NaN values are marked by `finite`, or are ratios beyond float64
    with np.errstate(over="ignore", invalid="ignore"):
        delta = b - a
        return pairs.assign(
            delta=delta,
            abs_delta=np.abs(delta),
            rho=np.exp(delta),
            prob_diff=np.exp(b) - np.exp(a),
            k3=k3(-delta),
            ulp=np.where(finite, ulp_distance(a32, b32), -1),
            bitwise_equal=~unequal_bits(a32, b32),
            finite=finite,
        )
