"""Where are two log-probs of the same token far apart? |delta| by probability, entropy, position, length, lag and more.

Noise in logits moves log p by about 1 - p, and p by about p (1 - p), so that differences of log-probs are largest for
rare tokens, and differences of probabilities for p between 0.1 and 0.9; both are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

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
# of METRICS, by the token; the columns of `bucket_table` after n_tokens
_METRICS = {
    "abs_p99": "token",
    "abs_max": "token",
    "abs_mean": "token_mean",
    "prob_abs_mean": "token_mean",
    "k1": "token_mean",
    "k3": "token_mean",
    "frac_bitwise_equal": "token_mean",
}
Buckets = dict[tuple[str, int], MismatchSums]  # by kind and index of the bucket; no empty bucket


def bucket_sums(tokens: pd.DataFrame) -> Buckets:
    """Sum the finite tokens of each bucket, from `with_mismatch` rows of whole responses."""

    def numbers(column: str) -> Floats:
        return tokens[column].to_numpy().astype(np.float64)

    lengths = np.diff(np.append(clusters.sequence_starts(tokens), len(tokens)))
    of_kind = {name: numbers(name) for name in ("position", LAG, TURN, ROUTE) if name in tokens}
    of_kind["prob"] = np.exp(numbers("logprobs_a"))
    of_kind["response_length"] = np.repeat(lengths, lengths).astype(np.float64)
    if "entropies" in tokens:
        of_kind["entropy"] = numbers("entropies")
    # a bucket has tokens of many responses; its metrics are of tokens, so one sum is enough
    finite, together = tokens["finite"].to_numpy(), tokens.assign(iteration=0, sequence=0)
    sums: Buckets = {}
    for kind, values in of_kind.items():
        bucket = np.where(finite, bucket_of(values, BUCKET_EDGES[kind]), -1)
        sums |= {(kind, k): mismatch_sums(together[bucket == k]) for k in np.unique(bucket).tolist() if k >= 0}
    return sums


def bucket_table(parts: Sequence[Buckets]) -> pd.DataFrame:
    """Return one row per kind and bucket that has tokens, from `bucket_sums` of several iterations.

    The table has no rows of a kind if the source lacks its column. The columns are kind, the bucket [lo, hi) in the
    unit of the kind, n_tokens (the number of finite tokens), and METRICS over these tokens: abs_p99, abs_max, abs_mean,
    prob_abs_mean, k1, k3 and frac_bitwise_equal.
    """
    rows = []
    for kind, edges in BUCKET_EDGES.items():
        for k, (lo, hi) in enumerate(pairwise(edges)):
            if sums := [part[kind, k] for part in parts if (kind, k) in part]:
                values = metric_values(merged_sums(sums))
                metrics = {name: values[name, reduction] for name, reduction in _METRICS.items()}
                count = int(values["n_tokens", "count"])
                rows.append({"kind": kind, "lo": lo, "hi": hi, "n_tokens": count, **metrics})
    return pd.DataFrame(rows, columns=["kind", "lo", "hi", "n_tokens", *_METRICS])
