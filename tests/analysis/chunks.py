"""Chunks of log-prob pairs for the tests of the mismatch analysis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd


def chunk(
    logprobs_a: Sequence[float], logprobs_b: Sequence[float], lengths: Sequence[int] | None = None, iteration: int = 0
) -> pd.DataFrame:
    """Sequences of these lengths (None: a single one); token ids count up."""
    sizes = np.array([len(logprobs_a)] if lengths is None else lengths, dtype=np.int64)
    assert sizes.sum() == len(logprobs_a) == len(logprobs_b)
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return pd.DataFrame(
        {
            "iteration": np.full(len(logprobs_a), iteration, np.int32),
            "sequence": np.repeat(np.arange(len(sizes)), sizes).astype(np.int32),
            "position": (np.arange(len(logprobs_a)) - starts).astype(np.int32),
            "token_id": np.arange(len(logprobs_a), dtype=np.int32),
            "logprobs_a": np.array(logprobs_a, dtype=np.float32),
            "logprobs_b": np.array(logprobs_b, dtype=np.float32),
        }
    )
