"""softmax(logits / temperature) over the eligible tokens as integer masses, and expectations under it.

Sums over the vocabulary are sums of integers, so their order does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic import elementwise
from ppo_repro.numerics.arithmetic.grid import ceil_log2, quantise, round_limbs

# The mass of the likeliest token; other masses are rounded to integers. Half a unit is so little that all tokens of a
# large vocabulary together do not change an entropy by more than float32 does.
MASS_UNIT = 2.0**39
PART_BITS = 13  # of a third of a mass
PART_MASK = (1 << PART_BITS) - 1
HALF_BITS = 20  # of the lower half of a mass, to square it
HALF_MASK = (1 << HALF_BITS) - 1
VALUE_BITS = 27  # of a value in an expectation, fewer for vocabularies of more than 2^20 tokens
NOT_FINITE = (
    "the model's logits are not finite, or further apart than float32 reaches; "
    "lower the learning rate or check the weights"
)


@dataclass(frozen=True)
class Distribution:
    """Integer masses of `n` positions. [n, V] unless noted."""

    masses: Tensor  # float64 integers, 0 where not eligible
    total: Tensor  # [n, 1] float64, the exact sum of masses rounded once
    log_total: Tensor  # [n, 1] float64, ln(total 2^-39)
    shifted: Tensor  # float32, logits / temperature minus the maximum over the eligible tokens


def require_finite(logits: Tensor) -> None:
    """Raise NumericsError if any logit is infinite or NaN."""
    if not torch.isfinite(logits).all():
        raise NumericsError(NOT_FINITE)


def distribution(scaled: Tensor, eligible: Tensor | None) -> Distribution:
    """Integer masses of softmax(scaled), scaled [n, V] float32; `eligible` bool [n, V], None for all.

    Raises NumericsError if the difference of a logit from the maximum is infinite or NaN.
    """
    # only eligible tokens count for the maximum: under new weights it may be far below the others
    eligible_logits = scaled if eligible is None else scaled.masked_fill(~eligible, float("-inf"))
    shifted = scaled - eligible_logits.amax(-1, keepdim=True)
    require_finite(shifted)
    masses = (elementwise.exp(shifted).to(torch.float64) * MASS_UNIT).round_()
    if eligible is not None:
        masses.masked_fill_(~eligible, 0.0)
    total = masses.to(torch.int64).sum(-1, keepdim=True).to(torch.float64)
    return Distribution(masses, total, elementwise.log(total * (1.0 / MASS_UNIT)), shifted)


def value_bits(vocab_size: int) -> int:
    """Grid bits of the values of an expectation: each of its sums stays below 2^60."""
    return min(VALUE_BITS, 60 - PART_BITS - ceil_log2(vocab_size))


def expectation(d: Distribution, values: Tensor) -> Tensor:
    """sum_v p_v values_v by three exact sums of products; float64 [n, 1]. values [n, V].

    All bits of the masses are used, as three parts of 13 bits. On a grid of their own the many small masses of a
    large vocabulary would be rounded to zero, which would change an entropy much.
    """
    b, b_scale = quantise(values, value_bits(values.shape[-1]))
    masses, b = d.masses.to(torch.int64), b.to(torch.int64)
    parts = masses >> 2 * PART_BITS, (masses >> PART_BITS) & PART_MASK, masses & PART_MASK
    highest, middle, lowest = ((part * b).sum(-1, keepdim=True) for part in parts)
    middle += lowest >> PART_BITS
    below = ((middle & PART_MASK) << PART_BITS) + (lowest & PART_MASK)
    return round_limbs(highest + (middle >> PART_BITS), below, 2 * PART_BITS) * b_scale / d.total


def sum_of_squares(d: Distribution) -> Tensor:
    """sum_v p_v^2, the sum of squared masses exact; float64 [n, 1]."""
    masses = d.masses.to(torch.int64)
    high, low = masses >> HALF_BITS, masses & HALF_MASK
    # (high 2^20 + low)^2
    highest, middle, lowest = (product.sum(-1, keepdim=True) for product in (high * high, high * low, low * low))
    middle = middle << 1
    above = highest + (middle >> HALF_BITS)
    below = lowest + ((middle & HALF_MASK) << HALF_BITS)
    return round_limbs(above, below, 2 * HALF_BITS) / (d.total * d.total)
