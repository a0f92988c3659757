"""Statistics of a stream in chunks that can be merged, with the same result for every chunking.

Counts are integers. Sums are integers too: every float64 is a multiple of 2**-1126, so the sum of any number of
them is an integer of that unit, exact and independent of order, rounded once when it is read. Quantiles come from a
histogram with fixed bins, so they depend only on the multiset of values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# frexp writes the smallest float64, 2**-1074, as 2**52 units of this size
_UNITS = 1 << 1126
_LOWEST_EXPONENT = -1073
# bincount adds 27-bit numbers as float64, exact up to this many
_LARGEST_CHUNK = 1 << 26


@dataclass(frozen=True)
class ExactSum:
    """A sum of float64 values: the finite ones as an integer of 2**-1126, the others as their float sum."""

    units: int = 0
    special: float = 0.0


def exact_sums(values: Floats) -> tuple[ExactSum, ...]:
    """The sum of each row of a [rows, n] array; raises ValueError for n above 2**26."""
    rows, count = values.shape
    if count > _LARGEST_CHUNK:
        raise ValueError(f"{count} values at once: sums are exact for at most {_LARGEST_CHUNK}")
    finite = np.isfinite(values)
    special = [float(row[~there].sum()) for row, there in zip(values, finite, strict=True)]
    fractions, exponents = np.frexp(np.where(finite, values, 0.0))
    mantissas = np.ldexp(fractions, 53).astype(np.int64)
    low = int(exponents.min(initial=0))
    span = int(exponents.max(initial=0)) - low + 1
    bins = (exponents - low + np.arange(rows)[:, None] * span).ravel()
    # halves of 26 and 27 bits, both of which a float64 adds without rounding
    upper = np.bincount(bins, (mantissas >> 26).ravel(), rows * span).reshape(rows, span)
    lower = np.bincount(bins, (mantissas & ((1 << 26) - 1)).ravel(), rows * span).reshape(rows, span)
    totals = [0] * rows
    for row, index in zip(*np.nonzero((upper != 0.0) | (lower != 0.0)), strict=True):
        mantissa = (int(upper[row, index]) << 26) + int(lower[row, index])
        totals[row] += mantissa << (low + int(index) - _LOWEST_EXPONENT)
    return tuple(ExactSum(total, extra) for total, extra in zip(totals, special, strict=True))


def add(a: ExactSum, b: ExactSum) -> ExactSum:
    """The sum of two sums."""
    return ExactSum(a.units + b.units, a.special + b.special)


def value(total: ExactSum) -> float:
    """The float64 nearest to the sum; infinite or NaN where an addend was."""
    return total.special if total.special != 0.0 else _ratio(total.units, _UNITS)


def _ratio(numerator: int, denominator: int) -> float:
    try:
        return numerator / denominator
    except OverflowError:
        return math.inf if numerator > 0 else -math.inf


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error, NaN where there is none."""

    value: float
    se: float = math.nan


@dataclass(frozen=True)
class ClusterSums:
    """Sums over items in clusters (tokens in sequences), for means and their standard errors.

    For every name: the sums over clusters of Y, Y^2, Y n, Y / n and (Y / n)^2, where Y is the cluster's sum
    and n its number of items.
    """

    clusters: int
    items: int
    items_squared: int
    sums: Mapping[str, tuple[ExactSum, ...]]


def cluster_sums(values: Mapping[str, Floats], counts: Ints) -> ClusterSums:
    """From the sums of each quantity over each cluster, and the sizes of the clusters, all at least 1."""
    n = counts.astype(np.float64)
    means = {name: y / n for name, y in values.items()}
    # a product beyond float64 is infinite, and its sum is reported as infinite
    with np.errstate(over="ignore"):
        stacked = [row for name, y in values.items() for row in (y, y * y, y * n, means[name], means[name] ** 2)]
    totals = exact_sums(np.array(stacked).reshape(5 * len(values), len(counts)))
    sums = {name: totals[5 * index : 5 * index + 5] for index, name in enumerate(values)}
    return ClusterSums(len(counts), int(counts.sum()), int((counts.astype(object) ** 2).sum()), sums)


def merge_clusters(a: ClusterSums, b: ClusterSums) -> ClusterSums:
    """The sums over the clusters of both; raises KeyError where the quantities differ."""
    sums = {
        name: tuple(add(x, y) for x, y in zip(totals, b.sums[name], strict=True)) for name, totals in a.sums.items()
    }
    return ClusterSums(a.clusters + b.clusters, a.items + b.items, a.items_squared + b.items_squared, sums)


def item_mean(sums: ClusterSums, name: str) -> Estimate:
    """m = sum Y / sum n, with the standard error of a ratio whose items are dependent within a cluster.

    se = sqrt(S / (S - 1) sum (Y - m n)^2) / sum n (linearised; S clusters); an se below 1e-8 of the rms of Y / n is
    rounding error. NaN for fewer than two clusters.
    """
    y, yy, yn, _, _ = sums.sums[name]
    if not sums.items:
        return Estimate(math.nan)
    if y.special != 0.0:
        return Estimate(y.special)
    mean = _ratio(y.units, _UNITS * sums.items)
    if sums.clusters < 2 or not math.isfinite(yy.special + yn.special) or not math.isfinite(mean):
        return Estimate(mean)
    n = sums.items
    residual = yy.units * _UNITS * n * n - 2 * y.units * yn.units * n + y.units * y.units * sums.items_squared
    squared = _ratio(max(residual, 0) * sums.clusters, _UNITS * _UNITS * n**4 * (sums.clusters - 1))
    return Estimate(mean, math.sqrt(squared))


def cluster_mean(sums: ClusterSums, name: str) -> Estimate:
    """The mean over clusters of Y / n, each cluster with the same weight; se = s / sqrt S."""
    return _plain_mean(sums.clusters, sums.sums[name][3], sums.sums[name][4])


def cluster_sum_mean(sums: ClusterSums, name: str) -> Estimate:
    """The mean over clusters of Y; se = s / sqrt S."""
    return _plain_mean(sums.clusters, sums.sums[name][0], sums.sums[name][1])


def _plain_mean(count: int, total: ExactSum, squares: ExactSum) -> Estimate:
    if not count:
        return Estimate(math.nan)
    if total.special != 0.0:
        return Estimate(total.special)
    mean = _ratio(total.units, _UNITS * count)
    if count < 2 or squares.special != 0.0:
        return Estimate(mean)
    residual = max(squares.units * _UNITS * count - total.units * total.units, 0)
    return Estimate(mean, math.sqrt(_ratio(residual, _UNITS * _UNITS * count * count * (count - 1))))


@dataclass(frozen=True)
class Extremes:
    """Smallest and largest value; +inf and -inf without values."""

    smallest: float = math.inf
    largest: float = -math.inf


def extremes(values: Floats) -> Extremes:
    """The extremes of finite or infinite values."""
    return Extremes(float(values.min(initial=math.inf)), float(values.max(initial=-math.inf)))


def merge_extremes(a: Extremes, b: Extremes) -> Extremes:
    """The extremes of both."""
    return Extremes(min(a.smallest, b.smallest), max(a.largest, b.largest))


# 128 bins between a power of two and the next, from 2**-150 to 2**130: all differences of two float32
_BITS_DROPPED = 45
_FIRST_BIN = (1023 - 150) << 7
BINS = 1 + (280 << 7)
QUANTILE_ERROR = 2.0**-8


def bins(values: Floats) -> Ints:
    """The histogram bin of each value: 0 for zero, then log-spaced; raises ValueError outside [2**-150, 2**130)."""
    index = (values.view(np.int64) >> _BITS_DROPPED) - (_FIRST_BIN - 1)
    index[values == 0.0] = 0
    if index.size and (index.min() < 0 or index.max() >= BINS or (index[values != 0.0] == 0).any()):
        raise ValueError("a histogram holds zeros and values from 2**-150 to 2**130")
    return index


def histogram(values: Floats) -> Ints:
    """How many values lie in each bin; histograms can be added."""
    return np.bincount(bins(values), minlength=BINS)


def quantile(counts: Ints, q: float) -> float:
    """The value that ceil(q n) of n values do not exceed, within a factor 1 +- 2**-8 (0: exact); NaN without values."""
    total = int(counts.sum())
    if not total:
        return math.nan
    index = int(np.searchsorted(np.cumsum(counts), max(1, math.ceil(q * total))))
    if not index:
        return 0.0
    edges = np.array([index, index + 1], dtype=np.int64) + (_FIRST_BIN - 1)
    return float((edges << _BITS_DROPPED).view(np.float64).mean())
