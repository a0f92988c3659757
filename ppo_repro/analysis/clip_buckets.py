"""Which tokens does the clip change? Shares of the flags by probability, entropy and position."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from ppo_repro.analysis.buckets import DOUBLING, ENTROPIES, PROBABILITIES, bucket_of
from ppo_repro.analysis.clip_flags import FLAGS, column, share, token_flags
from ppo_repro.analysis.visits import SUBSETS, IterationRows, in_subset, policy_rows


class ClipBucket(NamedTuple):
    """Tokens of policy steps in a bucket [lo, hi): the first columns of `clip_bucket`."""

    iteration: int
    kind: str  # prob (under the anchor), entropy or position
    subset: str  # of SUBSETS
    lo: float
    hi: float  # which the last bucket of a kind includes
    n_tokens: int


def clip_bucket(loaded: IterationRows) -> pd.DataFrame:
    """Return a row per `ClipBucket` that has tokens, with its share of each flag; a value of NaN is in no bucket."""
    tokens = policy_rows(loaded)
    flags = token_flags(tokens, loaded.rule)
    kinds = {
        "prob": (np.exp(column(tokens, "anchor_logprobs")), PROBABILITIES),
        "entropy": (column(tokens, "entropies"), ENTROPIES),
        "position": (column(tokens, "position"), DOUBLING),
    }
    rows = []
    for kind, (values, edges) in kinds.items():
        codes = bucket_of(values, edges)
        for subset in SUBSETS:
            is_in = in_subset(subset, tokens) & (codes >= 0)
            for code in np.unique(codes[is_in]):
                chosen = is_in & (codes == code)
                bucket = ClipBucket(loaded.iteration, kind, subset, edges[code], edges[code + 1], int(chosen.sum()))
                rows.append((*bucket, *(share(flag[chosen]) for flag in flags)))
    return pd.DataFrame(rows, columns=[*ClipBucket._fields, *FLAGS])
