"""Mismatch by probability, entropy, position, response length, lag of the sampler, turn, and route through experts.

Noise in logits moves log p by about (1 - p) and p by about p (1 - p). So differences of log-probs are largest for rare
tokens, and differences of probabilities for p between 0.1 and 0.9. Both are computed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.mismatch.token import ENTROPY_EDGES, PROB_EDGES, bucket_of, sequence_starts
from analysis.pairs.places import LAG, PLACES, ROUTE, ROUTES, TURN
from analysis.stats import exact_sums

# positions, lengths, lags and turns: 0, 1, 2-3, 4-7, ...
DOUBLING = (0.0, *(float(1 << power) for power in range(31)))
EDGES = {
    "prob": PROB_EDGES,
    "entropy": ENTROPY_EDGES,
    "position": DOUBLING,
    "seq_len": DOUBLING,
    LAG: DOUBLING,
    TURN: DOUBLING,
    ROUTE: tuple(float(index) for index in range(len(ROUTES) + 1)),
}
SUMS = ("abs", "prob_abs", "k1", "k2", "k3")
BUCKET_COLUMNS = [
    "kind",
    "lo",
    "hi",
    "n",
    "abs_mean",
    "abs_p99",
    "abs_max",
    "prob_abs_mean",
    "k1",
    "k2",
    "k3",
    "frac_eq",
]


@dataclass(frozen=True)
class BucketSums:
    """The sums of one kind, one entry per bucket.

    Counts are exact. A sum of n values x has an error of at most n 2**-52 sum |x|, whatever the chunking; for totals
    use the exact sums of `analysis.mismatch.sums`.
    """

    n: exact_sums.Ints
    equal: exact_sums.Ints
    sums: npt.NDArray[np.float64]  # [len(SUMS), buckets]
    largest: npt.NDArray[np.float64]
    abs_counts: exact_sums.Ints  # [buckets up to the last that is not empty, exact_sums.BINS]


def bucket_sums(tokens: pd.DataFrame) -> dict[str, BucketSums]:
    """The sums of `mismatch_token` rows of whole sequences; tokens that are not finite are left out."""
    starts = sequence_starts(tokens)
    lengths = np.diff(np.append(starts, len(tokens)))
    finite = tokens["finite"].to_numpy()
    finite_tokens = tokens if finite.all() else tokens[finite]
    length_buckets = np.repeat(bucket_of(lengths.astype(np.float64), DOUBLING), lengths)[finite]
    bucket_by_kind = {
        "prob": finite_tokens["prob_bucket"].to_numpy(),
        "entropy": finite_tokens["entropy_bucket"].to_numpy(),
        "position": bucket_of(finite_tokens["position"].to_numpy().astype(np.float64), DOUBLING),
        "seq_len": length_buckets,
        **{name: _place_buckets(finite_tokens, name) for name in PLACES},
    }
    absolute = finite_tokens["abs_delta"].to_numpy()
    columns = [
        absolute,
        np.abs(finite_tokens["prob_diff"].to_numpy()),
        -finite_tokens["delta"].to_numpy(),
        finite_tokens["k2"],
        finite_tokens["k3"],
    ]
    values = [np.asarray(column) for column in columns]
    equal, bins = finite_tokens["bitwise_equal"].to_numpy(), exact_sums.bins(absolute)
    return {kind: _sums(buckets, len(EDGES[kind]) - 1, values, equal, bins) for kind, buckets in bucket_by_kind.items()}


def _place_buckets(tokens: pd.DataFrame, name: str) -> npt.NDArray[np.int8]:
    """The bucket of each token's place of this name; -1 where the source has none."""
    if name not in tokens:
        return np.full(len(tokens), -1, np.int8)
    return bucket_of(tokens[name].to_numpy().astype(np.float64), EDGES[name])


def _sums(
    bucket: npt.NDArray[np.int8],
    buckets: int,
    values: list[npt.NDArray[np.float64]],
    equal: npt.NDArray[np.bool_],
    bins: exact_sums.Ints,
) -> BucketSums:
    if (bucket < 0).any():
        inside = bucket >= 0
        bucket, equal, bins = bucket[inside], equal[inside], bins[inside]
        values = [value[inside] for value in values]
    index = bucket.astype(np.int64)
    largest = np.full(buckets, -math.inf)
    np.maximum.at(largest, index, values[0])
    used = int(index.max(initial=-1)) + 1
    counts = np.bincount(index * exact_sums.BINS + bins, minlength=used * exact_sums.BINS)
    return BucketSums(
        n=np.bincount(index, minlength=buckets),
        equal=np.bincount(index[equal], minlength=buckets),
        sums=np.array([np.bincount(index, value, minlength=buckets) for value in values]),
        largest=largest,
        abs_counts=counts.reshape(used, exact_sums.BINS),
    )


def merge_buckets(a: Mapping[str, BucketSums], b: Mapping[str, BucketSums]) -> dict[str, BucketSums]:
    """The sums over the tokens of both."""
    return {
        kind: BucketSums(
            n=sums.n + b[kind].n,
            equal=sums.equal + b[kind].equal,
            sums=sums.sums + b[kind].sums,
            largest=np.maximum(sums.largest, b[kind].largest),
            abs_counts=_added(sums.abs_counts, b[kind].abs_counts),
        )
        for kind, sums in a.items()
    }


def _added(a: exact_sums.Ints, b: exact_sums.Ints) -> exact_sums.Ints:
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    total = longer.copy()
    total[: len(shorter)] += shorter
    return total


def bucket_table(sums: Mapping[str, BucketSums]) -> pd.DataFrame:
    """kind, [lo, hi) (probability of a, nats, tokens, ..), n (int64), token means and quantiles of |delta| and more.

    Buckets without tokens are left out; so are kinds that the source has no column for, as entropy and places
    (`analysis.pairs.places`: iterations, turns, index of ROUTES).
    abs_p99 has a relative error of 2**-8; k1, k2, k3 estimate KL(a || b).
    """
    tables = [_bucket_rows(kind, kind_sums) for kind, kind_sums in sums.items()]
    return pd.concat(tables, ignore_index=True)[BUCKET_COLUMNS]


def _bucket_rows(kind: str, sums: BucketSums) -> pd.DataFrame:
    used = np.flatnonzero(sums.n)
    edges, n = np.array(EDGES[kind]), sums.n[used]
    means = dict(zip(SUMS, sums.sums[:, used] / n, strict=True))
    return pd.DataFrame(
        {
            "kind": np.full(len(used), kind, dtype=object),
            "lo": edges[used],
            "hi": edges[used + 1],
            "n": n,
            "abs_mean": means["abs"],
            # the middle of the last bin may lie above the largest value
            "abs_p99": [
                min(exact_sums.quantile(sums.abs_counts[bucket], 0.99), sums.largest[bucket]) for bucket in used
            ],
            "abs_max": sums.largest[used],
            "prob_abs_mean": means["prob_abs"],
            "k1": means["k1"],
            "k2": means["k2"],
            "k3": means["k3"],
            "frac_eq": sums.equal[used] / n,
        }
    )


def position_slope(table: pd.DataFrame) -> float:
    """Theil-Sen slope of mean |delta| on position, nats per token: the median over all pairs of position buckets.

    The position of a bucket [lo, hi) is its middle, (lo + hi - 1) / 2. NaN for fewer than two buckets.
    """
    rows = table[table["kind"] == "position"]
    x, y = (rows["lo"].to_numpy() + rows["hi"].to_numpy() - 1.0) / 2.0, rows["abs_mean"].to_numpy()
    i, j = np.triu_indices(len(rows), 1)
    return float(np.median((y[j] - y[i]) / (x[j] - x[i]))) if len(i) else math.nan
