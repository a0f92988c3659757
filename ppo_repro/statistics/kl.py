"""Estimate KL(p || q) per token, in nats and float64, from tokens that p sampled.

`log_ratio` is log p - log q of each token, as in `ppo.kl`, which has the same estimators in torch: their bits are part
of a run, so they use the kernels' exp. Source: Schulman, "Approximating KL Divergence", 2020.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def k1(log_ratio: Floats) -> Floats:
    """Return x = log_ratio, float64 [N]. Its mean has no bias and may be negative."""
    return log_ratio


def k2(log_ratio: Floats) -> Floats:
    """Return x^2 / 2 for x = log_ratio, float64 [N]. Its mean is biased and never negative."""
    return 0.5 * log_ratio * log_ratio


def k3(log_ratio: Floats) -> Floats:
    """Return e^-x - 1 + x for x = log_ratio, float64 [N]. Its mean has no bias and is never negative.

    expm1 keeps the digits that e^-x - 1 would lose near x = 0; k3 is infinite for x < -709.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # infinite and NaN log-probs give NaN
        return np.asarray(np.expm1(-log_ratio) + log_ratio, dtype=np.float64)
