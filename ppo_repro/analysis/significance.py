"""Test a mean, a difference of means, and several hypotheses at once.

A p-value of NaN in a t-test means that the data cannot decide: fewer than two units, or no spread at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

from ppo_repro.statistics.clusters import Floats

SIGN_FLIP_DRAWS = 999
POWER = 0.8


@dataclass(frozen=True)
class Permutation:
    """Result of a sign-flip test: over all `relabellings` if `exact`, else over this number of random ones."""

    stat: float
    p_value: float
    relabellings: int
    exact: bool = False


@dataclass(frozen=True)
class Estimate:
    """Mean or difference of means; standard error and degrees of freedom are NaN for fewer than two values."""

    mean: float
    se: float
    df: float


def require_finite_samples(*samples: Floats) -> None:
    """Raise ValueError if a sample is empty or has a value that is not finite."""
    for sample in samples:
        if not len(sample) or not np.isfinite(sample).all():
            raise ValueError("a sample must have at least one value, and only finite ones")


def sign_flip(values: Floats, rng: np.random.Generator, draws: int = SIGN_FLIP_DRAWS) -> Permutation:
    """Test by sign changes H0: each value is as likely as its negative. The statistic is the mean, p is two-sided.

    The test takes all 2**n sign changes if they are at most `draws` + 1, and otherwise `draws` random sign changes
    (`scipy.stats.permutation_test`). One value and its negative have the same size, so their p is 1. Raises ValueError
    on values that are not finite.
    """
    require_finite_samples(values)
    n = len(values)
    if n == 1:  # one value and its negative
        return Permutation(float(values[0]), 1.0, 2, True)
    exact = 2**n <= draws + 1
    relabellings = 2**n if exact else draws
    test = stats.permutation_test(
        (values,), lambda x, axis: x.mean(axis=axis), permutation_type="samples", vectorized=True,
        n_resamples=relabellings, rng=rng, batch=max(1, (1 << 21) // n),
    )  # fmt: skip
    return Permutation(float(values.mean()), float(test.pvalue), relabellings, exact)


def one_sample(values: Floats) -> Estimate:
    """Return the mean with se = s / sqrt n and n - 1 degrees of freedom.

    Raises ValueError on values that are not finite.
    """
    require_finite_samples(values)
    n = len(values)
    if n < 2:
        return Estimate(float(values.mean()), math.nan, math.nan)
    return Estimate(float(values.mean()), float(values.std(ddof=1) / math.sqrt(n)), float(n - 1))


def welch(a: Floats, b: Floats) -> Estimate:
    """Return mean(b) - mean(a) with se^2 = s_a^2 / n_a + s_b^2 / n_b and Welch's degrees of freedom.

    Source: Welch, 1947. Raises ValueError on values that are not finite.
    """
    require_finite_samples(a, b)
    mean = float(b.mean() - a.mean())
    if min(len(a), len(b)) < 2:
        return Estimate(mean, math.nan, math.nan)
    error_a, error_b = float(a.var(ddof=1)) / len(a), float(b.var(ddof=1)) / len(b)
    if error_a + error_b == 0.0:
        return Estimate(mean, 0.0, math.nan)
    df = (error_a + error_b) ** 2 / (error_a**2 / (len(a) - 1) + error_b**2 / (len(b) - 1))
    return Estimate(mean, math.sqrt(error_a + error_b), df)


def t_test(estimate: Estimate) -> float:
    """Return the two-sided p-value of H0: the mean is 0; NaN without a spread."""
    if not estimate.se > 0:
        return math.nan
    return float(2 * stats.t.sf(abs(estimate.mean) / estimate.se, estimate.df))


def t_interval(estimate: Estimate, level: float) -> tuple[float, float]:
    """Return mean -+ t se, the two-sided Student interval of this level; NaN without a spread."""
    if not estimate.se > 0:
        return math.nan, math.nan
    low, high = stats.t.interval(level, estimate.df, estimate.mean, estimate.se)
    return float(low), float(high)


def tost(estimate: Estimate, margin: float) -> float:
    """Return the p-value of H0: |mean| >= margin, by two one-sided t-tests; a small p means equivalent.

    p = max(P(T >= (mean + margin) / se), P(T >= (margin - mean) / se)). Without a spread, p is 0 inside the margin and
    1 outside. NaN for fewer than two values. Source: Schuirmann, 1987. Raises ValueError on a margin that is not
    positive.
    """
    if not margin > 0:
        raise ValueError(f"margin = {margin}: must be positive")
    room = margin - abs(estimate.mean)
    if estimate.se == 0.0:
        return 0.0 if room > 0 else 1.0
    return float(stats.t.sf(room / estimate.se, estimate.df))


def detectable(sd: float, n: int, alpha: float) -> float:
    """Return the smallest mean of n paired differences that a two-sided t-test of level alpha finds with prob. POWER.

    `sd` is the standard deviation of the differences; the mean is in its unit. NaN if sd is 0 or n < 2.
    """
    if not sd > 0 or n < 2:
        return math.nan
    df, se = n - 1, sd / math.sqrt(n)
    limit = stats.t.isf(alpha / 2, df)
    return float(optimize.brentq(lambda shift: stats.nct.sf(limit, df, shift) - POWER, 0.0, 20.0 + 5 * limit)) * se


def holm(p_values: Sequence[float]) -> Floats:
    """Return Holm's adjusted p-values, max over smaller p of (m - rank) p, at most 1; NaN stays, outside of m.

    Source: Holm, 1979.
    """
    p = np.asarray(p_values, np.float64)
    valid = np.flatnonzero(~np.isnan(p))
    order = valid[np.argsort(p[valid], kind="stable")]
    adjusted = np.full(len(p), np.nan)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)))
    return adjusted
