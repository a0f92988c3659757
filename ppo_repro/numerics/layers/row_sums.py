"""Means of rows, of their squares and of the products of two, by exact sums."""

from __future__ import annotations

from torch import Tensor

from ppo_repro.numerics.arithmetic import elementwise
from ppo_repro.numerics.arithmetic.grid import DOT_BITS, MANTISSA_BITS, ceil_log2, exact_dot, quantise


def mean_bits(size: int) -> int:
    """Grid bits of the terms of a mean: the widest with which a sum of `size` of them is exact in float64."""
    return MANTISSA_BITS - ceil_log2(size)


def row_mean(x: Tensor, where: str = "a number") -> Tensor:
    """Mean of each row, float64 [.., 1], by an exact sum on the widest grid that the row's length allows."""
    size = x.shape[-1]
    integers, scale = quantise(x, mean_bits(size), where=where)
    return elementwise.divided(integers.sum(-1, keepdim=True) * scale, size)


def row_mean_square(x: Tensor, where: str = "a number") -> Tensor:
    """Mean of x_k^2 over each row, float64 [.., 1], by an exact sum of squares."""
    size = x.shape[-1]
    integers, scale = quantise(x, DOT_BITS, where=where)
    return elementwise.divided(exact_dot(integers, integers) * (scale * scale), size)


def row_dot(a: Tensor, b: Tensor, where: str = "a number") -> Tensor:
    """Mean of a_k b_k over each row, float64 [.., 1], by an exact sum of products."""
    (x, x_scale), (y, y_scale) = quantise(a, DOT_BITS, where=where), quantise(b, DOT_BITS, where=where)
    return elementwise.divided(exact_dot(x, y) * (x_scale * y_scale), a.shape[-1])
