"""Chunks of log-prob pairs for the tests of the mismatch analysis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from hypothesis import strategies as st


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


def random_chunk(seed: int, lengths: Sequence[int], sigma: float, iteration: int = 0) -> pd.DataFrame:
    """Log-probs down to about -9; four in ten equal, the others apart by sigma."""
    generator = np.random.default_rng([seed, iteration])
    rows = sum(lengths)
    a = -np.abs(generator.standard_normal(rows) * 3).astype(np.float32)
    noise = (generator.standard_normal(rows) * sigma).astype(np.float32)
    b = np.where(generator.random(rows) < 0.4, a, np.minimum(a + noise, np.float32(0.0)))
    frame = chunk(a.tolist(), b.tolist(), lengths, iteration)
    return frame.assign(entropies=np.abs(generator.standard_normal(rows)).astype(np.float32))


LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=6)
CHUNKS = st.builds(random_chunk, st.integers(0, 10_000), LENGTHS, st.sampled_from([1e-7, 1e-3, 0.1, 1.0]))


def cut(frame: pd.DataFrame, borders: Sequence[int]) -> list[pd.DataFrame]:
    """The frame in parts before the given sequences."""
    places = frame["sequence"].to_numpy()
    group = np.searchsorted(np.sort(np.array(borders, dtype=np.int64)), places, side="right")
    return [frame[group == index].reset_index(drop=True) for index in np.unique(group)]
