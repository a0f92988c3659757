"""Do two samples come from one distribution? Permutation tests on responses, scores and lengths.

`paired`: sample i of both was drawn for the same request, and only these two are swapped. That is exact under H0
whether or not the two share random numbers. Without pairs all labels of a stratum are shuffled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from analysis.stats.significance import DRAWS, ROUNDING, Floats, Permutation, require_finite, signs
from ppo_repro.errors import UserError

PAD = -1
_LARGEST = 4096  # responses of both samples to one prompt, since their kernel is a matrix
_BATCH = 1 << 20

Ints = npt.NDArray[np.int64]


def padded(responses: Sequence[npt.NDArray[np.int32]], width: int) -> Ints:
    """[responses, width] token ids, -1 after the end; ValueError where a response is longer."""
    lengths = np.array([len(ids) for ids in responses], np.int64)
    if lengths.max(initial=0) > width:
        raise ValueError(f"a response of {lengths.max()} tokens does not fit into {width} columns")
    table = np.full((len(responses), width), PAD, np.int64)
    if len(responses):
        table[np.arange(width) < lengths[:, None]] = np.concatenate(responses)
    return table


def _weights(n_a: int, n_b: int, flips: Floats | None, rng: np.random.Generator, draws: int) -> Floats:
    """[1 + draws, n_a + n_b]: weights 1 / n_a and -1 / n_b of the two samples, as observed and then relabelled."""
    observed = np.concatenate([np.full(n_a, 1 / n_a), np.full(n_b, -1 / n_b)])
    if flips is not None:
        relabelled = np.hstack([flips, -flips]) / n_a
    else:
        relabelled = rng.permuted(np.tile(observed, (draws, 1)), axis=1)
    return np.vstack([observed, relabelled])


def _permutation(statistics: Floats, n: int, exact: bool, scale: float) -> Permutation:
    null = statistics[1:]
    reached = int((null >= statistics[0] - ROUNDING * scale).sum())
    p_value = reached / len(null) if exact else (1 + reached) / (1 + len(null))
    return Permutation(float(statistics[0] - null.mean()), p_value, n, len(null), exact)


def mmd_hamming(
    a: Ints,
    b: Ints,
    strata_a: npt.NDArray[np.int64],
    strata_b: npt.NDArray[np.int64],
    rng: np.random.Generator,
    *,
    paired: bool,
    draws: int = DRAWS,
) -> Permutation:
    """MMD^2 of responses, prompt by prompt, permuted within the prompt (Gao et al., 2024, Model Equality Testing).

    a, b: `padded` ids of one width L. k(x, y) = share of the L columns that are equal. For a stratum (prompt)
    MMD^2 = mean k(a, a') + mean k(b, b') - 2 mean k(a, b); strata are weighted by their number of samples. stat = MMD^2
    minus its mean over the relabellings, about 0 under H0. n_units = responses to prompts that have at least two in
    both samples; the others say nothing and are left out.

    NaN without such a prompt. Raises ValueError where widths differ or pairs are in different strata, UserError for
    more than 4,096 responses to one prompt.
    """
    if a.shape[1] != b.shape[1] or (paired and not np.array_equal(strata_a, strata_b)):
        raise ValueError("samples must have the same width, and pairs the same stratum")
    usable = _usable(strata_a, strata_b)
    if not len(usable):
        return Permutation(math.nan, math.nan, 0, 0, False)
    exact, flips = False, None
    usable_rows = np.isin(strata_a, usable)
    a, strata_a = a[usable_rows], strata_a[usable_rows]
    usable_rows = np.isin(strata_b, usable)
    b, strata_b = b[usable_rows], strata_b[usable_rows]
    if paired:
        exact, batches = signs(len(a), rng, draws)
        flips = np.vstack([batch.astype(np.int8) for batch in batches])
    statistics: Floats | float = 0.0
    for rows_a, rows_b in zip(_groups(strata_a), _groups(strata_b), strict=True):
        both = np.concatenate([a[rows_a], b[rows_b]])
        kernel = (both[:, None, :] == both[None, :, :]).mean(axis=2)
        of_stratum = None if flips is None else flips[:, rows_a].astype(np.float64)
        weights = _weights(len(rows_a), len(rows_b), of_stratum, rng, draws)
        share = (len(rows_a) + len(rows_b)) / (len(a) + len(b))
        statistics = statistics + share * ((weights @ kernel) * weights).sum(axis=1)
    return _permutation(np.asarray(statistics), len(a) + len(b), exact, 1.0)


def _usable(strata_a: npt.NDArray[np.int64], strata_b: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    names_a, counts_a = np.unique(strata_a, return_counts=True)
    names_b, counts_b = np.unique(strata_b, return_counts=True)
    usable = np.intersect1d(names_a[counts_a > 1], names_b[counts_b > 1])
    size = counts_a[np.isin(names_a, usable)] + counts_b[np.isin(names_b, usable)]
    if size.max(initial=0) > _LARGEST:
        raise UserError(f"{size.max()} responses to one prompt, at most {_LARGEST}; compare fewer iterations")
    return usable


def _groups(strata: npt.NDArray[np.int64]) -> list[npt.NDArray[np.intp]]:
    """The rows of every stratum, strata in ascending order."""
    order = np.argsort(strata, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(strata[order])) + 1)


def energy_distance(a: Floats, b: Floats, rng: np.random.Generator, *, paired: bool, draws: int = DRAWS) -> Permutation:
    """2 E|x - y| - E|x - x'| - E|y - y'| = 2 integral (F_a - F_b)^2, by permutation (Székely and Rizzo, 2013).

    stat = the distance minus its mean over the relabellings. Raises ValueError on values that are not finite, and on
    paired samples of different sizes.
    """
    require_finite(a, b)
    if paired and len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} values cannot be pairs")
    both = np.concatenate([a, b])
    order = np.argsort(both, kind="stable")
    ordered = both[order]
    last = np.append(np.flatnonzero(np.diff(ordered)), len(ordered) - 1)
    gaps = np.diff(ordered[last])
    batches_of_distances = []
    exact, batches = signs(len(a), rng, draws) if paired else (False, _shuffles(len(both), draws))
    for flips in batches:
        weights = _weights(len(a), len(b), flips if paired else None, rng, len(flips))
        apart = np.cumsum(weights[:, order], axis=1)[:, last[:-1]]
        batches_of_distances.append(2 * (apart**2 @ gaps))
    distances = np.concatenate([batches_of_distances[0][:1], *(part[1:] for part in batches_of_distances)])
    return _permutation(distances, len(both), exact, float(gaps.sum()))


def _shuffles(n: int, draws: int) -> list[Floats]:
    """Empty batches whose lengths are how many relabellings to make at once."""
    rows = max(1, _BATCH // n)
    return [np.empty((min(rows, draws - start), 0)) for start in range(0, draws, rows)]
