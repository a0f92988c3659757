"""Do two samples come from one distribution? Permutation tests on responses, scores and lengths.

`paired`: sample i of both was drawn for the same request, and only these two are swapped. That is exact under H0
whether or not the two share random numbers. Without pairs all labels of a stratum are shuffled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from analysis.stats.significance import DRAWS, Floats, Permutation, require_finite
from ppo_repro.errors import UserError

PAD = -1
_LARGEST = 4096  # responses of both samples to one prompt, since their kernel is a matrix
# relative; sums of the same numbers in another order may differ by it and count as equal
_ROUNDING = 1e-12

Ints = npt.NDArray[np.int64]


def padded(responses: Sequence[npt.NDArray[np.int32]], width: int) -> Ints:
    """[responses, width] token ids, -1 after the end."""
    table = np.full((len(responses), width), PAD, np.int64)
    for row, ids in zip(table, responses, strict=True):
        row[: len(ids)] = ids
    return table


def _weights(n_a: int, n_b: int, paired: bool, rng: np.random.Generator, draws: int) -> Floats:
    """[1 + draws, n_a + n_b]: weights 1 / n_a and -1 / n_b of the two samples, as observed and then relabelled."""
    observed = np.concatenate([np.full(n_a, 1 / n_a), np.full(n_b, -1 / n_b)])
    if paired:
        signs = rng.choice([1.0, -1.0], (draws, n_a))
        return np.vstack([observed, np.hstack([signs, -signs]) / n_a])
    return np.vstack([observed, rng.permuted(np.tile(observed, (draws, 1)), axis=1)])


def _permutation(statistics: Floats, n: int, scale: float) -> Permutation:
    null = statistics[1:]
    reached = int((null >= statistics[0] - _ROUNDING * scale).sum())
    return Permutation(float(statistics[0] - null.mean()), (1 + reached) / (1 + len(null)), n, len(null))


def mmd_hamming(
    a: Ints, b: Ints, strata_a: Ints, strata_b: Ints, rng: np.random.Generator, *, paired: bool, draws: int = DRAWS
) -> Permutation:
    """MMD^2 of responses, prompt by prompt, permuted within the prompt (Gao et al., 2024, Model Equality Testing).

    a, b: `padded` ids of one width L. k(x, y) = share of the L columns that are equal. For a stratum (prompt)
    MMD^2 = mean k(a, a') + mean k(b, b') - 2 mean k(a, b); strata are weighted by their number of samples. stat = MMD^2
    minus its mean over the relabellings, about 0 under H0. n_units = responses to prompts that have at least two in
    both samples; the others say nothing and are left out.

    NaN without such a prompt. Raises UserError for more than 4,096 responses to one prompt.
    """
    groups, total = [], 0
    for stratum in np.intersect1d(strata_a, strata_b):
        of_a, of_b = a[strata_a == stratum], b[strata_b == stratum]
        if min(len(of_a), len(of_b)) < 2:
            continue
        size = len(of_a) + len(of_b)
        if size > _LARGEST:
            raise UserError(f"{size} responses to one prompt, at most {_LARGEST}; compare fewer iterations")
        groups.append((of_a, of_b))
        total += size
    if not groups:
        return Permutation(math.nan, math.nan, 0, 0)
    statistics = np.zeros(1 + draws)
    for of_a, of_b in groups:
        both = np.concatenate([of_a, of_b])
        kernel = (both[:, None, :] == both[None, :, :]).mean(axis=2)
        weights = _weights(len(of_a), len(of_b), paired, rng, draws)
        statistics += len(both) / total * ((weights @ kernel) * weights).sum(axis=1)
    return _permutation(statistics, total, 1.0)


def energy_distance(a: Floats, b: Floats, rng: np.random.Generator, *, paired: bool, draws: int = DRAWS) -> Permutation:
    """2 E|x - y| - E|x - x'| - E|y - y'| = 2 integral (F_a - F_b)^2, by permutation (Székely and Rizzo, 2013).

    stat = the distance minus its mean over the relabellings. Raises ValueError on values that are not finite.
    """
    require_finite(a, b)
    both = np.concatenate([a, b])
    order = np.argsort(both, kind="stable")
    ordered = both[order]
    last = np.append(np.flatnonzero(np.diff(ordered)), len(ordered) - 1)
    gaps = np.diff(ordered[last])
    distances: list[float] = []
    while len(distances) < 1 + draws:
        size = min(1 + draws - len(distances), max(1, (1 << 20) // len(both)))
        weights = _weights(len(a), len(b), paired, rng, size)[bool(distances) :]
        apart = np.cumsum(weights[:, order], axis=1)[:, last[:-1]]
        distances += (2 * (apart**2 @ gaps)).tolist()
    return _permutation(np.array(distances[: 1 + draws]), len(both), float(gaps.sum()))
