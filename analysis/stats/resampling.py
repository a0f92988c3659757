"""Bootstrap intervals: over sequences, and over seeds within strata (the other settings of a grid)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from analysis.stats.significance import DRAWS, Floats, require_finite

_BATCH = 1 << 21  # elements of one batch of resamples

# (strata of a, strata of b), each stratum [draws, seeds] -> the statistic of each draw, [draws]
Statistic = Callable[[Sequence[Floats], Sequence[Floats]], Floats]


def percentiles(draws: Floats, level: float) -> tuple[float, float]:
    """The middle share `level` of the draws."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def cluster_bootstrap(
    sums: Floats, counts: npt.NDArray[np.int64], rng: np.random.Generator, *, level: float = 0.95, draws: int = DRAWS
) -> tuple[float, float]:
    """Percentile interval of sum Y / sum n when whole clusters (responses) are resampled, not items (tokens).

    sums: Y, the sum over each cluster; counts: its items n. Raises ValueError on values that are not finite.
    """
    require_finite(sums)
    clusters = len(sums)
    ratios, rows = np.empty(draws), max(1, _BATCH // clusters)
    for start in range(0, draws, rows):
        size = min(rows, draws - start)
        resample = rng.integers(0, clusters, (size, clusters))
        ratios[start : start + size] = sums[resample].sum(axis=1) / counts[resample].sum(axis=1)
    return percentiles(ratios, level)


def iqm(values: Floats) -> Floats:
    """Interquartile mean over the last axis: without the lowest and highest floor(n / 4) (Agarwal et al., 2021)."""
    n = values.shape[-1]
    return np.asarray(np.sort(values, axis=-1)[..., n // 4 : n - n // 4].mean(axis=-1))


def mean_difference(a: Sequence[Floats], b: Sequence[Floats]) -> Floats:
    """Mean over strata of mean(b) - mean(a), for each draw."""
    differences = [y.mean(axis=-1) - x.mean(axis=-1) for x, y in zip(a, b, strict=True)]
    return np.asarray(np.mean(differences, axis=0))


def iqm_difference(a: Sequence[Floats], b: Sequence[Floats]) -> Floats:
    """iqm of all of b minus iqm of all of a, for each draw."""
    return iqm(np.concatenate(b, axis=-1)) - iqm(np.concatenate(a, axis=-1))


def probability_of_improvement(a: Sequence[Floats], b: Sequence[Floats]) -> Floats:
    """Mean over strata of P(b > a) + P(b = a) / 2 over all pairs of seeds, for each draw (Agarwal et al., 2021)."""
    shares = []
    for x, y in zip(a, b, strict=True):
        gaps = y[..., :, None] - x[..., None, :]
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
    otherwise within each stratum and group. Raises ValueError on values that are not finite.
    """
    require_finite(*a, *b)
    if paired:
        sizes = {len(values) for values in (*a, *b)}
        if len(sizes) != 1:
            raise ValueError(f"paired groups must have equally many seeds everywhere; there are {sorted(sizes)}")
        (n,) = sizes
        resample = rng.integers(0, n, (draws, n))
        resampled = [[values[resample] for values in group] for group in (a, b)]
    else:
        resampled = [
            [values[rng.integers(0, len(values), (draws, len(values)))] for values in group] for group in (a, b)
        ]
    low, high = percentiles(statistic(resampled[0], resampled[1]), level)
    return float(statistic(a, b)), low, high
