"""softmax(logits / temperature) over the eligible tokens as integer masses, and expectations under it.

Sums over the vocabulary are sums of integers below 2^53, so their order does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic import elementwise
from ppo_repro.numerics.arithmetic.grid import MANTISSA_BITS, ceil_log2, quantise

MASS_UNIT = 2.0**30  # the mass of the likeliest token; other masses are rounded to integers
HALF_BITS = 15  # of a mass: it is split into two halves
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


def expectation(d: Distribution, values: Tensor) -> Tensor:
    """sum_v p_v values_v by two exact sums of products; float64 [n, 1]. values [n, V].

    All bits of the masses are used, as two halves of 15 bits. On a grid of their own the many small masses of a
    large vocabulary would be rounded to zero, which would change an entropy much.
    """
    high = (d.masses * 2.0**-HALF_BITS).floor_()
    low = d.masses - high * 2.0**HALF_BITS
    b, b_scale = quantise(values, MANTISSA_BITS - HALF_BITS - ceil_log2(values.shape[-1]))
    total = (high * b).sum(-1, keepdim=True) * 2.0**HALF_BITS + (low * b).sum(-1, keepdim=True)
    return total * b_scale / d.total
