"""Compute rule 9, the means of whitening and losses."""

from __future__ import annotations

import math

from ppo_repro.numerics.definition.elementary import Array


def mean(x: Array) -> float:
    """Compute rule 9: the correctly rounded sum of all elements over their number, float64; 0 for no elements.

    The order of the elements has no effect. The package computes this mean in `sums.mean_of`.
    """
    return math.fsum(x.ravel().tolist()) / x.size if x.size else 0.0
