"""Rule 9, means: of whitening and losses."""

from __future__ import annotations

import math

from ppo_repro.numerics.definition.elementary import Array


def mean(x: Array) -> float:
    """Rule 9: the correctly rounded sum of all elements over their number, float64; 0 for no elements.

    No order of the elements can show. Computed in `sums.mean_of`.
    """
    return math.fsum(x.ravel().tolist()) / x.size if x.size else 0.0
