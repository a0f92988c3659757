"""Random numbers and arrays for tests of statistics."""

from __future__ import annotations

import numpy as np

from ppo_repro.analysis.significance import Floats


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def array(*values: float) -> Floats:
    return np.array(values, np.float64)
