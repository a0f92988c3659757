"""Random numbers and limits for tests of statistics."""

from __future__ import annotations

import numpy as np
from scipy import stats

from analysis.stats.significance import Floats


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def array(*values: float) -> Floats:
    return np.array(values, np.float64)


def limits(rate: float, sets: int) -> tuple[float, float]:
    """Where the share of rejections lies with probability 0.999 if each has this probability."""
    low, high = stats.binom.interval(0.999, sets, rate)
    return float(low) / sets, float(high) / sets
