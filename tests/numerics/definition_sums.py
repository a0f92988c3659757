"""The norm of gradients and AdamW, written out slowly in NumPy, for comparison with the kernels on every bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ppo_repro.numerics.optimizer import AdamWSettings
from tests.numerics.definition import row_sum
from tests.numerics.definition_elementary import Array, F, fma

NORM_BLOCK = 4096


def square(gradient: Array, block: int = NORM_BLOCK) -> float:
    """sum g^2 in float64: blocks of 4,096 elements by 16 lanes, added in order."""
    flat, total = gradient.reshape(-1), 0.0
    for start in range(0, len(flat), block):
        part = flat[start : start + block]
        total += float(row_sum(part, part))
    return total


def norm(gradients: Sequence[Array]) -> float:
    """sqrt of the sum over tensors, in order."""
    total = 0.0
    for gradient in gradients:
        total += square(gradient)
    return math.sqrt(total)


def power(base: float, exponent: int) -> float:
    """The product of base^(2^i) for each bit i of the exponent, from the lowest."""
    result = 1.0
    for bit in reversed(f"{exponent:b}"):
        if bit == "1":
            result = result * base
        base = base * base
    return result


@dataclass
class Moments:
    p: Array
    m: Array
    v: Array


def adamw(of: Moments, gradient: Array, s: AdamWSettings, norm: float, step: int) -> Moments:
    """AdamW with decoupled weight decay after clipping; every constant is computed in float64 and rounded once."""
    clip = 1.0 if s.max_grad_norm == 0 else min(1.0, s.max_grad_norm / (float(F(norm)) + 1e-6))
    rate, unroot = (
        s.learning_rate / (1.0 - power(s.beta1, step)),
        1.0 / math.sqrt(1.0 - power(s.beta2, step)),
    )
    g = F(clip) * gradient
    m = fma(F(s.beta1), of.m, F(1.0 - s.beta1) * g)
    v = fma(F(s.beta2), of.v, F(1.0 - s.beta2) * g * g)
    change = F(rate) * m / fma(np.sqrt(v), F(unroot), F(s.eps))
    return Moments(fma(F(1.0 - s.learning_rate * s.weight_decay), of.p, -change), m, v)
