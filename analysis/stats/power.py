"""What can a comparison of seeds detect? Its false positives on equal groups, and the smallest effect it finds."""

from __future__ import annotations

import math

import numpy as np

from analysis.stats.significance import Floats, require_finite, sign_flip_p_values, welch_p_values

_LARGEST_EFFECT = 20.0  # standard deviations; an effect not detected at this size never is
_HALVINGS = 24


def null_rejection_rate(
    n: int, rng: np.random.Generator, *, paired: bool, alpha: float = 0.05, datasets: int = 500
) -> float:
    """Share of simulated data sets without any effect that the test calls different; at most alpha for a valid test.

    Normal noise, n seeds; paired: sign changes of n differences; otherwise Welch's t on two groups of n.
    """
    return float((_p_values(_noise(n, rng, paired, datasets), 0.0, paired, rng) <= alpha).mean())


def minimum_detectable_effect(
    sd: float,
    n: int,
    rng: np.random.Generator,
    *,
    paired: bool,
    alpha: float = 0.05,
    power: float = 0.8,
    datasets: int = 500,
) -> float:
    """The smallest difference detected in a share `power` of simulated data sets, in the unit of `sd`.

    sd: of the differences (paired) or within a group. Normal noise, the same in every step of a bisection; tests as
    in `null_rejection_rate`. Infinite where no effect reaches alpha: the smallest p of n = 5 pairs is 2 / 2**5. NaN
    where nothing varies, or for n < 2.
    """
    if not sd > 0 or n < 2:
        return math.nan
    noise = _noise(n, rng, paired, datasets)

    def has_power(effect: float) -> bool:
        return float((_p_values(noise, effect, paired, rng) <= alpha).mean()) >= power

    low, high = 0.0, _LARGEST_EFFECT
    if not has_power(high):
        return math.inf
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if has_power(middle) else (middle, high)
    return high * sd


def _noise(n: int, rng: np.random.Generator, paired: bool, datasets: int) -> tuple[Floats, Floats]:
    return rng.standard_normal((datasets, n)), rng.standard_normal((datasets, 0 if paired else n))


def _p_values(noise: tuple[Floats, Floats], effect: float, paired: bool, rng: np.random.Generator) -> Floats:
    return sign_flip_p_values(noise[0] + effect, rng) if paired else welch_p_values(noise[1], noise[0] + effect)


def split_rejection_rate(values: Floats, rng: np.random.Generator, *, alpha: float = 0.05, splits: int = 500) -> float:
    """A/A: how often Welch's t calls two random halves of the seeds of one configuration different.

    A rate far above alpha means that the test does not suit such data. NaN for fewer than four seeds. Halves overlap,
    so the rate is less certain than from independent splits. Raises ValueError on values that are not finite.
    """
    require_finite(values)
    half = len(values) // 2
    if half < 2:
        return math.nan
    shuffled = rng.permuted(np.tile(values, (splits, 1)), axis=1)
    return float((welch_p_values(shuffled[:, :half], shuffled[:, half : 2 * half]) <= alpha).mean())
