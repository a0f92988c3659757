"""Rounding to grids, and sums of products that are exact in every order.

Each row is rounded to its own grid, x ~ A * 2^(e - p) with integers |A| <= 2^p. Products of grid integers and all
their partial sums stay below 2^53, so float64 holds them exactly, in any order, with or without fused multiply-add,
on any device. One rounding follows. A row's grid depends on that row alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic.elementwise import pow2

MANTISSA_BITS = 53
OPERAND_BITS = 20
# smallest exponent of a grid: so scales stay normal float32 numbers
MIN_EXPONENT = -100


def ceil_log2(n: int) -> int:
    """Smallest k with 2^k >= n, for n >= 1."""
    return (n - 1).bit_length()


def operand_bits(terms: int) -> int:
    """Grid bits p of both operands of a sum of `terms` products: 2p + ceil(log2 terms) <= 53, p <= 20.

    Raises NumericsError where fewer than 12 bits would be left.
    """
    bits = min(OPERAND_BITS, (MANTISSA_BITS - ceil_log2(terms)) // 2)
    if bits < 12:
        raise NumericsError(f"a sum of {terms} products leaves {bits} bits per operand; at least 12 are needed")
    return bits


def folded_bits(max_terms: int) -> int:
    """Grid bits of a weight that is multiplied by a scale first, for sums of up to `max_terms` products with 20 bits.

    Raises NumericsError where fewer than 12 bits would be left.
    """
    bits = min(22, MANTISSA_BITS - OPERAND_BITS - ceil_log2(max_terms))
    if bits < 12:
        raise NumericsError(f"a sum of {max_terms} products leaves {bits} bits for a weight; at least 12 are needed")
    return bits


def exponent(maximum: Tensor) -> Tensor:
    """Smallest e with maximum < 2^e, int64, clamped below at -100. Non-negative finite input."""
    e = torch.frexp(maximum)[1].to(torch.int64).clamp_(min=MIN_EXPONENT)
    # frexp says 0 = 0 * 2^0; where scales are multiplied into weights, a row of zeros must not raise their grid
    return e.masked_fill_(maximum == 0, MIN_EXPONENT)


def quantise(x: Tensor, bits: int, dim: int = -1, where: str = "a number") -> tuple[Tensor, Tensor]:
    """Round each row of `x` along `dim` to its own grid; returns the integers A and their scale.

    A = rne(x 2^(bits - e)) with 2^e > max |x|, as float64 of the shape of x. The scale is 2^(e - bits), float64, of
    size 1 along `dim`. x is float32 or float64; NumericsError naming `where` if it is not finite.
    """
    largest = x.abs().amax(dim, keepdim=True)
    if not torch.isfinite(largest).all():
        raise NumericsError(f"{where} is not finite; lower the learning rate or check the weights")
    e = exponent(largest)
    return (x.to(torch.float64) * pow2(bits - e)).round_(), pow2(e - bits)


def contract(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """y = fl32(sum_k A[.., i, k] B[.., j, k] scale_a[i] scale_b[j]) + 0, float32 [.., I, J].

    `a` [.., I, K] and `b` [.., J, K] are results of `quantise`. Adding zero turns -0 into 0.
    """
    total = a[0] @ b[0].transpose(-1, -2)
    return total.mul_(a[1]).mul_(b[1].transpose(-1, -2)).to(torch.float32).add_(0.0)


def exact_mean(values: Tensor) -> float:
    """Mean of a tensor: the correctly rounded sum, the same in every order, over the count. 0 elements give 0."""
    flat = values.detach().to(torch.float64).reshape(-1).tolist()
    return math.fsum(flat) / len(flat) if flat else 0.0


def exact_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums of consecutive runs of [N] values, `lengths` [B] with sum N -> [B] float64, each correctly rounded."""
    runs = values.detach().to(torch.float64).split(lengths.tolist())
    return torch.tensor([math.fsum(run.tolist()) for run in runs], dtype=torch.float64)
