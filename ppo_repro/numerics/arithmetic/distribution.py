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

MASS_UNIT = 2.0**30  # the mass of the likeliest token; other masses are rounded to integers
HALF_BITS = 15  # of a mass: it is split into two halves
LOW_MASK = (1 << HALF_BITS) - 1
VALUE_BITS = 27  # of a value in an expectation, fewer for vocabularies of more than 2^18 tokens
NOT_FINITE = (
    "the model's logits are not finite, or further apart than float32 reaches; "
    "lower the learning rate or check the weights"
)


@dataclass(frozen=True)
class Distribution:
    """Integer masses of `n` positions. [n, V] unless noted."""

    masses: Tensor  # float64 integers, 0 where not eligible
    total: Tensor  # [n, 1] float64, exact sum of masses
    log_total: Tensor  # [n, 1] float64, ln(total 2^-30)
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
    total = masses.sum(-1, keepdim=True)
    return Distribution(masses, total, elementwise.log(total * (1.0 / MASS_UNIT)), shifted)


def value_bits(vocab_size: int) -> int:
    """Grid bits of the values of an expectation: both of its sums stay below 2^60."""
    return min(VALUE_BITS, 60 - HALF_BITS - ceil_log2(vocab_size))


def _halves(d: Distribution) -> tuple[Tensor, Tensor]:
    masses = d.masses.to(torch.int64)
    return masses >> HALF_BITS, masses & LOW_MASK


def expectation(d: Distribution, values: Tensor) -> Tensor:
    """sum_v p_v values_v by two exact sums of products; float64 [n, 1]. values [n, V].

    All bits of the masses are used, as two halves of 15 bits. On a grid of their own the many small masses of a
    large vocabulary would be rounded to zero, which would change an entropy much.
    """
    high, low = _halves(d)
    b, b_scale = quantise(values, value_bits(values.shape[-1]))
    b = b.to(torch.int64)
    above, below = ((half * b).sum(-1, keepdim=True) for half in (high, low))
    return round_limbs(above, below, HALF_BITS) * b_scale / d.total


def sum_of_squares(d: Distribution) -> Tensor:
    """sum_v p_v^2, the sum of squared masses exact; float64 [n, 1]."""
    high, low = _halves(d)
    # (high 2^15 + low)^2
    middle = (high * low).sum(-1, keepdim=True) << 1
    above = (high * high).sum(-1, keepdim=True) + (middle >> HALF_BITS)
    below = (low * low).sum(-1, keepdim=True) + ((middle & LOW_MASK) << HALF_BITS)
    return round_limbs(above, below, 2 * HALF_BITS) / (d.total * d.total)
