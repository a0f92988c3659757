"""Estimate KL(a || b) from tokens that a sampled, in float64: x = log b - log a of each token, nats.

Source: Schulman, "Approximating KL Divergence", 2020.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def k1(x: Floats) -> Floats:
    """Return -x of each token, float64 [N]; its mean has no bias and may be negative."""
    return -x


def k2(x: Floats) -> Floats:
    """Return x^2 / 2 of each token, float64 [N]; its mean is biased and never negative."""
    return 0.5 * x * x


def k3(x: Floats) -> Floats:
    """Return e^x - 1 - x of each token, float64 [N]; its mean has no bias and is never negative.

    expm1 keeps the digits that e^x - 1 would lose near x = 0; k3 is infinite for x > 709.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # infinite and NaN log-probs give NaN
        return np.asarray(np.expm1(x) - x, dtype=np.float64)
