"""Percentile bootstraps over responses, and over seeds within strata (the other settings of a grid)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from analysis.stats.significance import DRAWS, Floats, require_finite

# (strata of a, strata of b), seeds along `axis` -> the statistic
Statistic = Callable[[Sequence[Floats], Sequence[Floats], int], Floats]


def _interval(
    data: Sequence[Any], statistic: Callable[..., Any], rng: np.random.Generator, level: float, draws: int, paired: bool
) -> tuple[float, float]:
    found = stats.bootstrap(
        data, statistic, n_resamples=draws, confidence_level=level, method="percentile", vectorized=True,
        paired=paired, rng=rng, batch=max(1, (1 << 21) // max(map(len, data))),
    ).confidence_interval  # fmt: skip
    return float(found.low), float(found.high)


def cluster_bootstrap(
    sums: Floats, counts: npt.NDArray[np.int64], rng: np.random.Generator, *, level: float = 0.95, draws: int = DRAWS
) -> tuple[float, float]:
    """Percentile interval of sum Y / sum n when whole clusters (responses) are resampled, not items (tokens).

    sums: Y, the sum over each cluster; counts: its items n. For one cluster the interval is that point. Raises
    ValueError on values that are not finite.
    """
    require_finite(sums)
    if len(sums) == 1:
        return float(sums[0] / counts[0]), float(sums[0] / counts[0])
    return _interval((sums, counts), lambda y, n, axis: y.sum(axis) / n.sum(axis), rng, level, draws, True)


def iqm_difference(a: Sequence[Floats], b: Sequence[Floats], axis: int = -1) -> Floats:
    """Interquartile mean of all of b minus that of all of a (Agarwal et al., 2021): without a quarter at each end."""
    of_a, of_b = (stats.trim_mean(np.concatenate(x, axis), 0.25, axis) for x in (a, b))
    return np.asarray(of_b - of_a)


def probability_of_improvement(a: Sequence[Floats], b: Sequence[Floats], axis: int = -1) -> Floats:
    """Mean over strata of P(b > a) + P(b = a) / 2 over all pairs of seeds (Agarwal et al., 2021)."""
    shares = []
    for x, y in zip(a, b, strict=True):
        gaps = np.moveaxis(y, axis, -1)[..., :, None] - np.moveaxis(x, axis, -1)[..., None, :]
        shares.append(((gaps > 0) + 0.5 * (gaps == 0)).mean(axis=(-1, -2)))
    return np.asarray(np.mean(shares, axis=0))


def stratified_bootstrap(
    a: Sequence[Floats],
    b: Sequence[Floats],
    statistic: Statistic,
    rng: np.random.Generator,
    *,
    paired: bool,
    level: float = 0.95,
    draws: int = DRAWS,
) -> tuple[float, float, float]:
    """(value, low, high): the statistic of a and b and its percentile interval; one array of seeds per stratum.

    Seeds are resampled: if `paired`, the same seeds in a and b and in every stratum, which all have the same order;
    otherwise within each stratum and group. For one seed the interval is the value. Raises ValueError on values that
    are not finite.
    """
    require_finite(*a, *b)
    value, strata = float(statistic(a, b, -1)), len(a)
    if min(map(len, (*a, *b))) < 2:
        return value, value, value

    def resampled(*groups: Floats, axis: int) -> Floats:
        return statistic(groups[:strata], groups[strata:], axis)

    return (value, *_interval((*a, *b), resampled, rng, level, draws, paired))
