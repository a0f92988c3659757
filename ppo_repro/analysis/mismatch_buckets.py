"""Where are two log-probs of the same token far apart? |delta| by probability, entropy, position, length, lag and more.

Noise in logits moves log p by about 1 - p, and p by about p (1 - p), so that differences of log-probs are largest for
rare tokens, and differences of probabilities for p between 0.1 and 0.9; both are computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ppo_repro.analysis.buckets import DOUBLING, ENTROPIES, PROBABILITIES, bucket_of
from ppo_repro.analysis.mismatch_metrics import quantities
from ppo_repro.analysis.pairs import LAG, ROUTE, ROUTES, TURN
from ppo_repro.statistics import clusters

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
_MEANS = ["abs_mean", "prob_abs_mean", "k1", "k3", "frac_bitwise_equal"]
_SUMS = ["n_tokens", *_MEANS]
BUCKET_COLUMNS = ["kind", "lo", "hi", "n_tokens", "abs_p99", "abs_max", *_MEANS]
_KEYS = ["kind", "bucket", "bin"]


def bucket_sums(tokens: pd.DataFrame) -> pd.DataFrame:
    """Sum `with_mismatch` rows of whole responses by kind, bucket and bin of |delta|, over finite tokens.

    `bucket_table` merges the frames of several iterations.
    """
    lengths = np.diff(np.append(clusters.sequence_starts(tokens), len(tokens)))
    columns = {
        "prob": np.exp(tokens["logprobs_a"].to_numpy().astype(np.float64)),
        "response_length": np.repeat(lengths, lengths).astype(np.float64),
        **{
            name: tokens[name].to_numpy().astype(np.float64)
            for name in ("position", LAG, TURN, ROUTE)
            if name in tokens
        },
    }
    if "entropies" in tokens:
        columns["entropy"] = tokens["entropies"].to_numpy().astype(np.float64)
    size, by_token = tokens["abs_delta"].to_numpy(), quantities(tokens)
    summed = pd.DataFrame(
        {"bin": clusters.log_bins(size), "abs_max": size, "n_tokens": 1, **{name: by_token[name] for name in _MEANS}}
    )
    frames = []
    for kind, values in columns.items():
        placed = summed.assign(kind=kind, bucket=bucket_of(values, BUCKET_EDGES[kind]))
        frames.append(_added([placed[tokens["finite"].to_numpy() & (placed["bucket"] >= 0)]]))
    return pd.concat(frames, ignore_index=True)


def _added(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    groups = pd.concat(parts, ignore_index=True).groupby(_KEYS, sort=True)
    return groups[_SUMS].sum().assign(abs_max=groups["abs_max"].max()).reset_index()


def bucket_table(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return one row per kind and bucket that has tokens, from frames of `bucket_sums`.

    The table has no rows of a kind if the source lacks its column. The columns are

        kind, lo, hi: the bucket [lo, hi) in the unit of the kind
        n_tokens: number of finite tokens
        abs_p99, abs_max, abs_mean: |delta| in nats; the percentile has a relative error of 2**-8
        prob_abs_mean: mean |difference of probabilities|
        k1, k3: KL(a || b), nats, token mean
        frac_bitwise_equal: share of tokens with equal bits
    """
    sums = _added(parts)
    rows = []
    for kind, edges in BUCKET_EDGES.items():
        for place, group in sums[sums["kind"] == kind].groupby("bucket"):
            bucket = int(str(place))
            count, largest = int(group["n_tokens"].sum()), float(group["abs_max"].max())
            means = {name: float(group[name].sum()) / count for name in _MEANS}
            # the middle of the last bin may lie above the largest value
            p99 = min(clusters.quantile(group.set_index("bin")["n_tokens"], 0.99), largest)
            numbers = {"lo": edges[bucket], "hi": edges[bucket + 1], "abs_p99": p99, "abs_max": largest, **means}
            rows.append({"kind": kind, "n_tokens": count, **numbers})
    return pd.DataFrame(rows, columns=BUCKET_COLUMNS)
