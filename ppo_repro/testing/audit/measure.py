"""The audit's one measure: are errors only rounding?

Errors are recorded minus predicted log-probs, in nats. `limits` has the numbers and their reasons.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ppo_repro.statistics.bits import in_bfloat16, in_float16
from ppo_repro.testing.audit import limits

Format = Literal["bfloat16", "float16"]
FORMATS: dict[Format, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Stored:
    """Narrower number format than float32 that holds all numbers of a side; without a name if there is none."""

    name: str = ""
    mantissa: int = 23  # bits; 0: `decimals` decide
    decimals: int = 9

    def half_spacing(self, x: Tensor) -> Tensor:
        """Return half the distance between neighbouring numbers of the format at each x, and 1 % more.

        The 1 % is for a side that was stored in float32 after it was rounded to the format.
        """
        if not self.name:
            return torch.zeros_like(x)
        if not self.mantissa:
            return torch.full_like(x, 0.505 * 10.0**-self.decimals)
        return 0.505 * torch.exp2(x.abs().clamp_min(2.0**-14).log2().floor() - self.mantissa)


def stored_as(values: Tensor) -> Stored:
    """Return the narrowest format that holds all these numbers, `Stored()` if they need float32."""
    numbers = values[values.isfinite() & (values != 0)].float().cpu()
    if len(numbers) < limits.FEWEST_NUMBERS:
        return Stored()
    if in_bfloat16(numbers.numpy()).all():
        return Stored("bfloat16", 7)
    if in_float16(numbers.numpy()).all():
        return Stored("float16", 10)
    for decimals in range(5):
        if torch.equal(torch.round(numbers.double(), decimals=decimals).float(), numbers):
            return Stored(f"{decimals} decimals", 0, decimals)
    return Stored()


def rms(x: Tensor) -> float:
    """Return the root of the mean square of x; 0 if x is empty."""
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def errors_of(recorded: Tensor, predicted: Tensor, stored: Stored) -> Tensor:
    """Return recorded - predicted, less what rounding to the stored format explains; at most limits.CLAMP nats."""
    apart = (recorded - predicted).nan_to_num(limits.CLAMP).clamp(-limits.CLAMP, limits.CLAMP)
    return apart.sign() * (apart.abs() - stored.half_spacing(recorded)).clamp_min(0.0)


def is_rounding(errors: Tensor, before: float, tolerance: float, narrow: float = 0.0) -> bool:
    """Return whether the errors that causes leave are rounding.

    Args:
        errors: the errors [n] that the causes leave, in nats.
        before: rms of the errors without the causes; infinity if there is nothing to compare with.
        tolerance: rms of the rounding of float32, times limits.RIGHT.
        narrow: rms of the rounding errors of a cause that rounds to 16 bits; 0 without such a cause. It is NaN or
            infinity if numbers overflow in 16 bits; then such a cause explains no errors.
    """
    is_float32 = (
        rms(errors) <= tolerance
        and float(errors.abs().amax()) <= limits.TOKEN_OVER_RMS * tolerance
        and rms(errors) < limits.OF_ERRORS * before
    )
    return is_float32 or (0.0 < narrow < math.inf and rms(errors) <= limits.OF_ROUNDING * narrow)


def sizes_apart(a: Tensor, b: Tensor) -> float:
    """Return how many times as large the larger of two errors is; infinity if one is 0."""
    small, large = sorted((rms(a), rms(b)))
    return large / small if small > 0 else math.inf


def likeness(errors: Tensor, computed: Tensor, rounded: Tensor) -> float:
    """Return the correlation of errors with 16-bit rounding; 0 if they have another size, or if it may be chance.

    Args:
        errors: errors [n] in nats.
        computed: errors of the model that computes in 16 bits.
        rounded: errors of the model whose weights alone are rounded.
    """
    if len(errors) != len(computed) or sizes_apart(errors, computed) > limits.FORMATS_APART**0.5:
        return 0.0
    like = max(correlation(errors, computed), correlation(errors, rounded))
    return like if like >= limits.NO_CHANCE / len(errors) ** 0.5 else 0.0


def correlation(a: Tensor, b: Tensor) -> float:
    """Return the correlation of two errors [n] around 0."""
    return float(torch.dot(a, b) / (a.norm() * b.norm()).clamp_min(1e-300))
