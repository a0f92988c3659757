"""Compute means with standard errors by cluster, and quantiles from counts. The order of the data has no effect.

Tokens of one response are not independent, so a standard error is over whole responses.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.statistics.kl import Floats

Ints = npt.NDArray[np.int64]

# A bin is a float64 without its lowest bits, because positive floats are ordered like their bits: 128 bins in an octave
_BITS_DROPPED = 45


class Ratio(NamedTuple):
    """Value and its standard error, which may be NaN."""

    value: float
    se: float = math.nan


def exact_sum(values: npt.ArrayLike) -> float:
    """Return the sum of float64 numbers, rounded once (`math.fsum`); inf or NaN if it is not finite."""
    array = np.asarray(values, np.float64)
    try:
        return math.fsum(array.tolist())
    except (OverflowError, ValueError):  # the sum is beyond float64; infinities of both signs
        with np.errstate(over="ignore", invalid="ignore"):
            return float(array.sum())


def sequence_starts(tokens: pd.DataFrame) -> npt.NDArray[np.intp]:
    """Return the index of the first row of each sequence. The rows of a sequence are consecutive."""
    keys = tokens[["iteration", "sequence"]].to_numpy()
    new = np.ones(len(keys), dtype=bool)
    new[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    return np.flatnonzero(new)


def segment_sums(values: Floats, starts: npt.NDArray[np.intp]) -> Floats:
    """Return the sum of each segment of `values`, float64. A segment begins at each index of `starts`."""
    return np.add.reduceat(values, starts) if len(starts) else np.zeros(0)


def ratio_of_sums(numerator: Floats, denominator: Floats) -> Ratio:
    """Return R = sum Y / sum X over clusters, and its linearised standard error. Each cluster has one Y and one X.

    se = sqrt(G / (G - 1) sum_g (Y_g - R X_g)^2) / sum X for G clusters, NaN for one cluster. R is NaN if sum X is 0 or
    not finite. A mean is the case X = 1. Source: Cochran, Sampling Techniques, 1977, 6.3.
    """
    total, clusters = exact_sum(denominator), len(numerator)
    if total == 0.0 or not math.isfinite(total):
        return Ratio(math.nan)
    value = exact_sum(numerator) / total
    if clusters < 2 or not math.isfinite(value):
        return Ratio(value)
    with np.errstate(over="ignore"):
        residual = exact_sum((numerator - value * denominator) ** 2)
    return Ratio(value, math.sqrt(clusters / (clusters - 1) * residual) / abs(total))


def mean(values: Floats) -> Ratio:
    """Return the mean over G clusters with one value each, and se = s / sqrt G."""
    return ratio_of_sums(values, np.ones(len(values)))


def effective_share(weight: float, weight_sq: float, count: float) -> float:
    """Return the effective sample size per sample, (sum w)^2 / (n sum w^2) in [1/n, 1]; NaN if sum w^2 is not finite.

    Args:
        weight: sum of the n weights.
        weight_sq: sum of their squares.
        count: n.
    """
    return weight**2 / (count * weight_sq) if 0.0 < weight_sq < math.inf else math.nan


def log_bins(values: Floats) -> Ints:
    """Return the bin of each number x >= 0, int64: 0 has its own bin, and the others are at most 2**-7 x wide."""
    return np.asarray(np.asarray(values, np.float64).view(np.int64) >> _BITS_DROPPED, np.int64)


def bin_counts(values: Floats) -> pd.Series:
    """Return how many of the numbers are in each bin of `log_bins`, by bin in ascending order."""
    return pd.Series(log_bins(values)).value_counts().sort_index()


def quantile(counts: pd.Series, q: float) -> float:
    """Return the q-quantile of numbers from their `bin_counts`.

    The q-quantile is the smallest number that at least ceil(q n) of the n numbers do not exceed. The relative error is
    at most 2**-8; 0 is exact. NaN without numbers.
    """
    total = int(counts.sum())
    if not total:
        return math.nan
    bin_of_quantile = counts.index[int(np.searchsorted(counts.cumsum(), max(1, math.ceil(q * total))))]
    edges = np.array([bin_of_quantile, bin_of_quantile + 1], np.int64) << _BITS_DROPPED
    return float(edges.view(np.float64).mean()) if bin_of_quantile else 0.0
