"""Compute rules 3 and 6: the norm of all gradients, and AdamW."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ppo_repro.numerics.definition.elementary import Array, F, fma
from ppo_repro.numerics.definition.row_sums import row_sum

STRETCH = 4096  # elements whose squares are summed as one row


def sum_of_squares(gradient: Array, stretch: int = STRETCH) -> float:
    """Compute rule 3: sum g^2 in float64, in stretches of 4,096 elements by 16 lanes, added in order.

    Kernel: `gradient_squares`.
    """
    flat, total = gradient.reshape(-1), 0.0
    for start in range(0, len(flat), stretch):
        part = flat[start : start + stretch]
        total += float(row_sum(part, part))
    return total


def global_norm(gradients: Sequence[Array]) -> float:
    """Compute rule 3: the root of the sum of squares over tensors, in order; float64."""
    total = 0.0
    for gradient in gradients:
        total += sum_of_squares(gradient)
    return math.sqrt(total)


def power(base: float, exponent: int) -> float:
    """Return base^exponent, float64: multiply base^(2^i) for each set bit i, from the lowest.

    The package computes it in `numerics.adamw.power`.
    """
    result = 1.0
    for bit in reversed(f"{exponent:b}"):
        if bit == "1":
            result = result * base
        base = base * base
    return result


@dataclass(frozen=True)
class Settings:
    """Constants of AdamW; with `max_grad_norm` 0, gradients are not clipped."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float


@dataclass(frozen=True)
class Moments:
    """Parameter p and AdamW's moments m and v, float32 of one shape."""

    p: Array
    m: Array
    v: Array


def adamw(of: Moments, gradient: Array, s: Settings, norm: float, step: int) -> Moments:
    """Compute rule 6: AdamW with decoupled weight decay, after clipping to the norm. Kernel: `adamw`.

    g = clip gradient, m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, p = (1 - lr wd) p - lr / (1 - b1^t) m / (sqrt(v)
    / sqrt(1 - b2^t) + eps), elementwise in float32. Every constant is computed in float64 and rounded once. Loshchilov
    and Hutter, 2019.

    Args:
        of: p, m and v before the step.
        gradient: gradient of p, of the shape of p.
        s: b1, b2, eps, lr, wd and the largest norm.
        norm: norm of the gradients of all parameters, float64; the package refuses one that float32 does not hold.
        step: t, from 1 on.
    """
    clip = 1.0 if s.max_grad_norm == 0 else min(1.0, s.max_grad_norm / (float(F(norm)) + 1e-6))
    rate = s.learning_rate / (1.0 - power(s.beta1, step))
    unroot = 1.0 / math.sqrt(1.0 - power(s.beta2, step))
    g = F(clip) * gradient
    m = fma(F(s.beta1), of.m, F(1.0 - s.beta1) * g)
    v = fma(F(s.beta2), of.v, F(1.0 - s.beta2) * g * g)
    change = F(rate) * m / fma(np.sqrt(v), F(unroot), F(s.eps))
    return Moments(fma(F(1.0 - s.learning_rate * s.weight_decay), of.p, -change), m, v)
