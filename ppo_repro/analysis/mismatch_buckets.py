"""Where are two log-probs of the same token far apart? |delta| by probability, entropy, position, length, lag and more.

Noise in logits moves log p by about 1 - p, and p by about p (1 - p), so that differences of log-probs are largest for
rare tokens, and differences of probabilities for p between 0.1 and 0.9; both are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd

from ppo_repro.analysis.buckets import DOUBLING, ENTROPIES, PROBABILITIES, bucket_of
from ppo_repro.records.logprob_pairs import LAG, ROUTE, ROUTES, TURN
from ppo_repro.statistics import clusters
from ppo_repro.statistics.clusters import Floats
from ppo_repro.statistics.mismatch_metrics import MismatchSums, merged_sums, metric_values, mismatch_sums

# edges of the buckets of each kind, in its unit
BUCKET_EDGES = {
    "prob": PROBABILITIES,  # of the token under side a
    "entropy": ENTROPIES,
    "position": DOUBLING,
    "response_length": DOUBLING,
    LAG: DOUBLING,
    TURN: DOUBLING,
    ROUTE: tuple(float(index) for index in range(len(ROUTES) + 1)),
}
Buckets = dict[tuple[str, int], MismatchSums]  # by kind and index of the bucket; no empty bucket


def bucket_sums(tokens: pd.DataFrame) -> Buckets:
    """Sum the finite tokens of each bucket, from `with_mismatch` rows of whole responses."""

    def numbers(column: str) -> Floats:
        return tokens[column].to_numpy().astype(np.float64)

    lengths = np.diff(np.append(clusters.sequence_starts(tokens), len(tokens)))
    kinds = {name: numbers(name) for name in ("position", LAG, TURN, ROUTE) if name in tokens}
    kinds["prob"] = np.exp(numbers("logprobs_a"))
    kinds["response_length"] = np.repeat(lengths, lengths).astype(np.float64)
    if "entropies" in tokens:
        kinds["entropy"] = numbers("entropies")
    is_finite = tokens["finite"].to_numpy()
    # a bucket has tokens of many responses; its metrics are of tokens, so all count as one response
    as_one_response = tokens.assign(iteration=0, sequence=0)
    sums: Buckets = {}
    for kind, values in kinds.items():
        bucket = np.where(is_finite, bucket_of(values, BUCKET_EDGES[kind]), -1)
        sums |= {(kind, k): mismatch_sums(as_one_response[bucket == k]) for k in np.unique(bucket).tolist() if k >= 0}
    return sums


class BucketRow(NamedTuple):
    """METRICS over the finite tokens of a bucket [lo, hi), in the unit of its kind: a row of `bucket_table`."""

    kind: str
    lo: float
    hi: float
    n_tokens: int
    abs_p99: float
    abs_max: float
    abs_mean: float
    prob_abs_mean: float
    k1: float
    k3: float
    frac_bitwise_equal: float


def bucket_table(parts: Sequence[Buckets]) -> pd.DataFrame:
    """Return a `BucketRow` per kind and bucket that has tokens, from `bucket_sums` of several iterations.

    The table has no rows of a kind if the source lacks its column.
    """
    rows = [
        _row(kind, lo, hi, merged_sums(sums))
        for kind, edges in BUCKET_EDGES.items()
        for k, (lo, hi) in enumerate(pairwise(edges))
        if (sums := [part[kind, k] for part in parts if (kind, k) in part])
    ]
    return pd.DataFrame(rows, columns=BucketRow._fields)


def _row(kind: str, lo: float, hi: float, sums: MismatchSums) -> BucketRow:
    values = metric_values(sums)
    return BucketRow(
        kind=kind,
        lo=lo,
        hi=hi,
        n_tokens=int(values["n_tokens", "count"]),
        abs_p99=values["abs_p99", "token"],
        abs_max=values["abs_max", "token"],
        abs_mean=values["abs_mean", "token_mean"],
        prob_abs_mean=values["prob_abs_mean", "token_mean"],
        k1=values["k1", "token_mean"],
        k3=values["k3", "token_mean"],
        frac_bitwise_equal=values["frac_bitwise_equal", "token_mean"],
    )
