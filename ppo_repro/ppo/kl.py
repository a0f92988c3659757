"""Estimators of a KL divergence from log-probs of sampled tokens. Schulman, "Approximating KL Divergence", 2020.

All estimate KL(p || q) per token, in nats, from tokens drawn from p, given `log_ratio` = log p - log q.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.numerics import elementwise


def k1(log_ratio: Tensor) -> Tensor:
    """log p - log q: unbiased, any sign. Shape and dtype of the input."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: never negative, biased at third order."""
    return log_ratio * log_ratio * 0.5


def k3(log_ratio: Tensor) -> Tensor:
    """q/p - 1 - log(q/p) = expm1(-x) + x for x = log p - log q: unbiased, never negative. Float64 result.

    Small x use the power series: exp(-x) - 1 + x in floating point loses all digits there.
    """
    x = log_ratio.to(torch.float64)
    series = torch.full_like(x, 1.0)
    # x^2/2 (1 - x/3 (1 - x/4 (1 - x/5 ...)))
    for n in range(16, 2, -1):
        series = 1.0 - x * series / n
    small = x * x * 0.5 * series
    large = elementwise.exp(-log_ratio.to(torch.float32)).to(torch.float64) - 1.0 + x
    return torch.where(x.abs() <= 1.0, small, large.clamp(min=0.0))


def estimate(kind: str, log_ratio: Tensor) -> Tensor:
    """The estimator called `kind` (k1, k2 or k3) as float32."""
    return {"k1": k1, "k2": k2, "k3": k3}[kind](log_ratio).to(torch.float32)
