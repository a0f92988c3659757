"""Tests of a mean, of a difference of means, and of several at once.

A p-value of NaN means that the data cannot decide: fewer than two units, or no spread at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]

DRAWS = 999
# up to this n all 2**n sign changes are enumerated, beyond it they are drawn
ENUMERATED = 12
_BATCH = 1 << 21  # elements of one batch of signs
# relative; sums of the same numbers in another order or with other signs may differ by it and count as equal
ROUNDING = 1e-12


@dataclass(frozen=True)
class Permutation:
    """A permutation test over all `relabellings` if `exact`, else over that many drawn besides the observed one."""

    stat: float
    p_value: float
    n_units: int
    relabellings: int
    exact: bool


@dataclass(frozen=True)
class Estimate:
    """A mean or difference of means, its standard error and Student's degrees of freedom; NaN where there are none."""

    mean: float
    se: float
    df: float


def require_finite(*samples: Floats) -> None:
    """Raises ValueError where a sample is empty or has a value that is not finite."""
    for sample in samples:
        if not len(sample) or not np.isfinite(sample).all():
            raise ValueError("a sample must have at least one value, and only finite ones")


def signs(n: int, rng: np.random.Generator, draws: int) -> tuple[bool, Iterator[Floats]]:
    """(True, all 2**n rows of n signs) where n <= 12, else (False, `draws` random rows), in batches."""
    if n <= ENUMERATED:
        bits = (np.arange(1 << n)[:, None] >> np.arange(n)) & 1
        return True, iter([_signs_of(bits)])
    rows = max(1, _BATCH // n)
    sizes = [min(rows, draws - start) for start in range(0, draws, rows)]
    return False, (_signs_of(rng.integers(0, 2, (size, n), dtype=np.int8)) for size in sizes)


def _signs_of(bits: npt.NDArray[Any]) -> Floats:
    return 1.0 - 2.0 * bits.astype(np.float64)


def sign_flip_p_values(data: Floats, rng: np.random.Generator, draws: int = DRAWS) -> Floats:
    """Two-sided p-value of every row of `data` [sets, n], all under the same sign changes; see `sign_flip`."""
    observed = np.abs(data.sum(axis=1))
    reached = observed - ROUNDING * np.abs(data).sum(axis=1)
    exact, batches = signs(data.shape[1], rng, draws)
    count = np.zeros(len(data), np.int64)
    for batch in batches:
        count += (np.abs(data @ batch.T) >= reached[:, None]).sum(axis=1)
    if exact:
        return np.asarray(count / (1 << data.shape[1]))
    return np.asarray((1 + count) / (1 + draws))


def sign_flip(values: Floats, rng: np.random.Generator, draws: int = DRAWS) -> Permutation:
    """H0: each value is as likely as its negative. stat = the mean.

    p = share of sign changes s with |mean(s * values)| >= |mean(values)|: all of them for n <= 12, else
    (1 + those among `draws`) / (1 + draws). Raises ValueError on values that are not finite.
    """
    require_finite(values)
    n = len(values)
    p_value = float(sign_flip_p_values(values[None, :], rng, draws)[0])
    exact = n <= ENUMERATED
    return Permutation(float(values.mean()), p_value, n, 1 << n if exact else draws, exact)


def one_sample(values: Floats) -> Estimate:
    """The mean with se = s / sqrt n and n - 1 degrees of freedom; raises ValueError on values that are not finite."""
    require_finite(values)
    n = len(values)
    if n < 2:
        return Estimate(float(values.mean()), math.nan, math.nan)
    return Estimate(float(values.mean()), float(values.std(ddof=1) / math.sqrt(n)), float(n - 1))


def welch(a: Floats, b: Floats) -> Estimate:
    """mean(b) - mean(a) with se^2 = s_a^2 / n_a + s_b^2 / n_b and Welch's degrees of freedom (Welch, 1947).

    Raises ValueError on values that are not finite.
    """
    require_finite(a, b)
    mean = float(b.mean() - a.mean())
    if min(len(a), len(b)) < 2:
        return Estimate(mean, math.nan, math.nan)
    of_a, of_b = float(a.var(ddof=1)) / len(a), float(b.var(ddof=1)) / len(b)
    if of_a + of_b == 0.0:
        return Estimate(mean, 0.0, math.nan)
    df = (of_a + of_b) ** 2 / (of_a**2 / (len(a) - 1) + of_b**2 / (len(b) - 1))
    return Estimate(mean, math.sqrt(of_a + of_b), df)


def welch_p_values(a: Floats, b: Floats) -> Floats:
    """Two-sided Welch p-value of every row of a [sets, n_a] and b [sets, n_b]; NaN where nothing varies."""
    of_a, of_b = a.var(axis=1, ddof=1) / a.shape[1], b.var(axis=1, ddof=1) / b.shape[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        df = (of_a + of_b) ** 2 / (of_a**2 / (a.shape[1] - 1) + of_b**2 / (b.shape[1] - 1))
        t = np.where(of_a + of_b > 0, (b.mean(axis=1) - a.mean(axis=1)) / np.sqrt(of_a + of_b), np.nan)
    return np.asarray(2 * stats.t.sf(np.abs(t), df))


def t_test(estimate: Estimate) -> float:
    """Two-sided p-value of H0: the mean is 0; NaN without a spread."""
    if not estimate.se > 0:
        return math.nan
    return float(2 * stats.t.sf(abs(estimate.mean) / estimate.se, estimate.df))


def t_interval(estimate: Estimate, level: float) -> tuple[float, float]:
    """mean -+ t se, the two-sided Student interval of this level; NaN without a spread."""
    if not estimate.se > 0:
        return math.nan, math.nan
    half = float(stats.t.ppf((1 + level) / 2, estimate.df)) * estimate.se
    return estimate.mean - half, estimate.mean + half


def tost(estimate: Estimate, margin: float) -> float:
    """p-value of H0: |mean| >= margin, by two one-sided t-tests (Schuirmann, 1987); a small p means equivalent.

    p = max(P(T >= (mean + margin) / se), P(T >= (margin - mean) / se)); for se = 0 the limits, 0 inside the margin and
    1 outside. NaN for fewer than two values. Raises ValueError on a margin that is not positive.
    """
    if not margin > 0:
        raise ValueError(f"margin = {margin}: must be positive")
    if math.isnan(estimate.se):
        return math.nan
    room = margin - abs(estimate.mean)
    if estimate.se == 0.0:
        return 0.0 if room > 0 else 1.0
    return float(stats.t.sf(room / estimate.se, estimate.df))


def holm(p_values: Sequence[float]) -> Floats:
    """Holm's (1979) adjusted p-values: max over smaller p of (m - rank) p, at most 1; NaN stays and is not counted."""
    p = np.asarray(p_values, np.float64)
    valid = np.flatnonzero(~np.isnan(p))
    order = valid[np.argsort(p[valid], kind="stable")]
    adjusted = np.full(len(p), np.nan)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)))
    return adjusted
