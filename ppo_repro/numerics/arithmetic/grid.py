"""Rounding to grids, and sums of products that are exact in every order.

Each row is rounded to its own grid, x ~ A * 2^(e - p) with integers |A| <= 2^p. Sums of products of grid integers are
exact: a float64 holds those of few terms, two of them, or integers, hold the rest. So a sum has the same value in any
order, with or without fused multiply-add, on any device. One rounding to float64 follows, then one to float32. A row's
grid depends on that row alone.

| operation                     | operands, bits                  | terms exact in one float64 |
|-------------------------------|---------------------------------|----------------------------|
| linear layer                  | inputs 26, weights 23           | 2^(53 - 49) = 16           |
| gradient of a weight          | output gradients 27, inputs 22  | 16                         |
| attention                     | left operand 25, right 24       | 16                         |
| mean square, dot product      | 26, 26                          | 2                          |
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic.elementwise import pow2

MANTISSA_BITS = 53
INPUT_BITS, WEIGHT_BITS = 26, 23  # of a linear layer: 49 bits a product
LEFT_BITS, RIGHT_BITS = 25, 24  # of the products of attention; float32 holds the right operand in the cache
WEIGHT_UNIT = 2.0**30  # softmax weights of attention are integers in units of 2^-30
DOT_BITS = 26  # of both operands of a dot product of two rows
GRADIENT_BITS, GRADIENT_INPUT_BITS = 27, 22  # of output gradients and of inputs in the gradient of a weight
PRODUCT_BITS = 49  # of the products above but the dot product's
LIMB_BITS = 42  # of the lower part of the integer gradients of a step with many tokens
EXACT_TERMS = 1 << (MANTISSA_BITS - PRODUCT_BITS)  # whose sum one float64 holds
# x + HIGH_START is a multiple of 2^20; what it loses is exact in another float64, for sums up to 2^70
HIGH_START = 1.5 * 2.0**72
SPLIT_BITS = 13  # of the lower part of a left operand
MAX_TERMS = 1 << 20
CHUNK = 1 << 16  # terms that are exact in float64 with a part of 13 bits of the left operand
# smallest exponent of a grid: so scales stay normal float32 numbers
MIN_EXPONENT = -100
# weights stay below 2^e / ROOM: then three signed 8-bit digits, which reach 8,355,711, hold their 23 bits
ROOM = 1.0 + 2.0**-6
# a row has outliers where all but a 64th of its numbers, or all but four, lie this many powers of two below the largest
INPUT_GAP, WEIGHT_GAP = 6, 4
OUTLIER_SHARE, LEAST_OUTLIERS = 64, 4
ATTENTION_NOT_FINITE = "attention is not finite: weights or inputs have left the range of float32"


def ceil_log2(n: int) -> int:
    """Smallest k with 2^k >= n, for n >= 1."""
    return (n - 1).bit_length()


def exponent(maximum: Tensor) -> Tensor:
    """Smallest e with maximum < 2^e, int64, clamped below at -100. Non-negative finite input."""
    e = torch.frexp(maximum)[1].to(torch.int64).clamp_(min=MIN_EXPONENT)
    # frexp says 0 = 0 * 2^0; where scales are multiplied into weights, a row of zeros must not raise their grid
    return e.masked_fill_(maximum == 0, MIN_EXPONENT)


def require_finite(largest: Tensor, where: str) -> None:
    """Raise NumericsError naming `where` if a maximum of magnitudes is not finite."""
    if not torch.isfinite(largest).all():
        raise NumericsError(f"{where} is not finite; lower the learning rate or check the weights")


def quantise(x: Tensor, bits: int, dim: int = -1, where: str = "a number") -> tuple[Tensor, Tensor]:
    """Round each row of `x` along `dim` to its own grid; returns the integers A and their scale.

    A = rne(x 2^(bits - e)) with 2^e > max |x|, as float64 of the shape of x. The scale is 2^(e - bits), float64, of
    size 1 along `dim`. x is float32 or float64; NumericsError naming `where` if it is not finite.
    """
    largest = x.abs().amax(dim, keepdim=True)
    require_finite(largest, where)
    e = exponent(largest)
    return (x.to(torch.float64) * pow2(bits - e)).round_(), pow2(e - bits)


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """fl64(sum_k a[.., i, k] b[.., k, j]) of integers, the sum exact, one rounding; float64 [.., I, J].

    a [.., I, K] and b [.., K, J] are float64 integers, |a| <= 2^26 and |b| <= 2^24, or |b| <= 2^26 where K <= 2^14.
    a = high 2^13 + low, so that both sums of 2^16 products are exact in float64; longer ones are added in int64.
    Raises NumericsError for more than 2^20 terms.
    """
    terms = a.shape[-1]
    if terms > MAX_TERMS:
        raise NumericsError(f"a sum of {terms} products; at most {MAX_TERMS} are exact")
    high = (a * 2.0**-SPLIT_BITS).floor_()
    low = a - high * 2.0**SPLIT_BITS
    if terms <= CHUNK:
        return (high @ b).mul_(2.0**SPLIT_BITS).add_(low @ b)
    parts = [slice(start, start + CHUNK) for start in range(0, a.shape[-1], CHUNK)]
    above, below = (
        torch.stack([(half[..., k] @ b[..., k, :]).to(torch.int64) for k in parts]).sum(0) for half in (high, low)
    )
    return round_limbs(above, below, SPLIT_BITS)


def round_limbs(above: Tensor, below: Tensor, bits: int) -> Tensor:
    """fl64(above 2^bits + below) of int64 numbers, |above| < 2^60, rounded once."""
    above = above + (below >> bits)
    # a coarse part of at most 52 bits and a fine part below its unit: float64 holds both
    fine = ((above & 0xFF) << bits) + (below & ((1 << bits) - 1))
    return (above >> 8).to(torch.float64).mul_(2.0 ** (8 + bits)).add_(fine.to(torch.float64))


def contract(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """y = fl32(fl64(sum_k A[.., i, k] B[.., j, k]) scale_a[i] scale_b[j]) + 0, float32 [.., I, J].

    `a` [.., I, K] and `b` [.., J, K] are results of `quantise`, see `exact_product`. Adding zero turns -0 into 0.
    """
    total = exact_product(a[0], b[0].transpose(-1, -2))
    return total.mul_(a[1]).mul_(b[1].transpose(-1, -2)).to(torch.float32).add_(0.0)


def exact_dot(a: Tensor, b: Tensor) -> Tensor:
    """fl64(sum_k a[.., k] b[.., k]) of integers up to 2^26, the sum exact, one rounding; float64 [.., 1].

    Raises NumericsError for more than 2^16 terms.
    """
    if a.shape[-1] > CHUNK:
        raise NumericsError(f"a dot product of {a.shape[-1]} terms; at most {CHUNK} are exact")
    products = (a * b).to(torch.int64)  # at most 2^52
    above = products >> DOT_BITS
    return round_limbs(above.sum(-1, keepdim=True), (products - (above << DOT_BITS)).sum(-1, keepdim=True), DOT_BITS)


def exact_mean(values: Tensor) -> float:
    """Mean of a tensor: the correctly rounded sum, the same in every order, over the count. 0 elements give 0."""
    flat = values.detach().to(torch.float64).reshape(-1).tolist()
    return math.fsum(flat) / len(flat) if flat else 0.0


def exact_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums of consecutive runs of [N] values, `lengths` [B] with sum N -> [B] float64, each correctly rounded."""
    runs = values.detach().to(torch.float64).split(lengths.tolist())
    return torch.tensor([math.fsum(run.tolist()) for run in runs], dtype=torch.float64)
