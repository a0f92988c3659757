"""Rounding to the number formats of other stacks: what a float32 number becomes there, as a float32 number.

Each law is elementwise, or sees one row alone, in operations that IEEE 754 fixes to the bit. So no layout changes it.

| format      | significand, bits | smallest normal | largest | beyond it          | scale                     |
|-------------|-------------------|-----------------|---------|--------------------|---------------------------|
| bfloat16    | 8                 | 2^-126          | 3.4e38  | infinity           | none                      |
| float16     | 11                | 2^-14           | 65504   | infinity           | none                      |
| float8_e4m3 | 4                 | 2^-6            | 448     | the largest        | max of the row / 448      |
| float8_e5m2 | 3                 | 2^-14           | 57344   | the largest        | max of the row / 57344    |
| int8        | integers          |                 | 127     | does not occur     | max of the row / 127      |

The two of 8 bits are those of Micikevicius et al., 2022 (e4m3 without infinities, torch's `float8_e4m3fn`). Numbers
beyond their largest are clamped, as serving stacks do before they cast, and as `cvt.satfinite` of CUDA does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_FLOAT32_BITS = 23  # of the stored significand


@dataclass(frozen=True)
class _Float:
    """A binary floating-point format below float32."""

    stored_bits: int  # of the significand
    smallest_exponent: int  # of a normal number
    largest: float
    beyond: float  # what a finite number above the largest becomes


_FLOATS = {
    "bfloat16": _Float(7, -126, (2.0 - 2.0**-7) * 2.0**127, math.inf),
    "float16": _Float(10, -14, 65504.0, math.inf),
    "float8_e4m3": _Float(3, -6, 448.0, 448.0),
    "float8_e5m2": _Float(2, -14, 57344.0, 57344.0),
}
_LARGEST_INT8 = 127.0  # symmetric: -128 is not used
WIDE = ("bfloat16", "float16")  # formats that need no scale
NARROW = ("float8_e4m3", "float8_e5m2", "int8")  # formats of 8 bits, with a scale for each row


def round_to(x: Tensor, name: str) -> Tensor:
    """The nearest number of a floating-point format, ties to even, without a scale; float32 -> float32.

    The sign of zero stays. What is not finite stays as it is.
    """
    form = _FLOATS[name]
    x = x.contiguous()
    dropped = _FLOAT32_BITS - form.stored_bits
    bits = x.view(torch.int32)
    odd = (bits >> dropped) & 1
    # a carry out of the significand raises the exponent, as it must
    y = (((bits + ((1 << (dropped - 1)) - 1)) + odd) & -(1 << dropped)).view(torch.float32)
    if form.smallest_exponent > -126:  # otherwise denormal numbers have the spacing that the integers above have
        # float32 has the spacing of the format's denormal numbers around this
        start = 1.5 * 2.0 ** (form.smallest_exponent - form.stored_bits + _FLOAT32_BITS)
        y = torch.where(x.abs() < 2.0**form.smallest_exponent, torch.copysign((x + start) - start, x), y)
    y = torch.where(y.abs() > form.largest, torch.copysign(torch.full_like(x, form.beyond), x), y)
    return torch.where(torch.isfinite(x), y, x)


def round_rows(x: Tensor, name: str) -> Tensor:
    """`round_to`, with a scale for each row (last dimension) in formats of 8 bits; float32 -> float32.

    s = fl(max |x| / L) with L the largest number of the format, y = fl(s rne(fl(x / s))). A row too small to have a
    scale gives zeros. Scales of a row of weights (output channel) or of a token, as `vllm` and `sglang` take them.
    """
    if name in WIDE:
        return round_to(x, name)
    largest = _LARGEST_INT8 if name == "int8" else _FLOATS[name].largest
    scale = x.abs().amax(-1, keepdim=True) / largest
    scaled = x / torch.where(scale > 0, scale, 1.0)
    rounded = scaled.round().clamp(-largest, largest) if name == "int8" else round_to(scaled, name)
    return torch.where(scale > 0, rounded * scale, 0.0 * x)
