"""Elementary functions that give the same bits on every machine.

The elementwise law: only + - * /, rounding and bit operations, each rounded once, in a fixed order. Library exp,
log, cos, sin and (on CPUs) torch.sqrt depend on the instruction set, the vector width or the position of an element.
Cody and Waite, Software Manual for the Elementary Functions, 1980.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

LOG2_E = 1.4426950408889634
# ln 2 in two float32 parts; the first has few bits, so that k * LN2_HIGH is exact for |k| < 2^15
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
LN2 = 0.6931471805599453
# minimax coefficients of (exp(r) - 1 - r) / r^2 on |r| <= ln(2)/2, highest power first
EXP_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
EXP_MIN, EXP_MAX = -87.0, 88.0
EXP64_MIN, EXP64_MAX = -708.0, 709.0
EXP64_LN2_HIGH, EXP64_LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10  # 33 bits in the first
EXP64_COEFFICIENTS = tuple(1.0 / math.factorial(i) for i in range(14, -1, -1))


def pow2(exponent: Tensor) -> Tensor:
    """2^exponent as float64, exactly, by setting the exponent bits. Integer input in [-1022, 1023]."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def divided(x: Tensor, divisor: float) -> Tensor:
    """x / divisor, rounded once on every device.

    CUDA turns a division by a number of Python into a multiplication by its rounded reciprocal (ATen,
    BinaryDivTrueKernel.cu); by a tensor of the same device it divides.
    """
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def sqrt(x: Tensor) -> Tensor:
    """Correctly rounded square root of a float32 or float64 tensor.

    On CPUs torch.sqrt calls a vector library that does not always round correctly; NumPy uses the CPU's instruction.
    """
    if x.device.type == "cpu":
        return torch.from_numpy(np.asarray(np.sqrt(x.detach().contiguous().numpy())))
    return torch.sqrt(x)


def exp(x: Tensor) -> Tensor:
    """e^x in float32, relative error below 1e-7; exp(0) is exactly 1.

    The argument is clamped to [-87, 88], where the result is a normal float32.
    """
    x = x.clamp(EXP_MIN, EXP_MAX)
    k = (x * LOG2_E).round_()
    r = x - k * LN2_HIGH
    r = r - k * LN2_LOW
    y = r * EXP_COEFFICIENTS[0]
    for c in EXP_COEFFICIENTS[1:]:
        y = y.add_(c).mul_(r)
    y = y.mul_(r).add_(r).add_(1.0)
    return y.mul_(((k.to(torch.int32) + 127) << 23).view(torch.float32))


def log(x: Tensor) -> Tensor:
    """ln(x) of a normal positive float64, to a few units in the last place.

    x = m 2^e with sqrt(1/2) <= m < sqrt(2); ln m = 2 artanh((m - 1) / (m + 1)).
    """
    mantissa, exponent = torch.frexp(x)
    low = mantissa < 0.7071067811865476
    mantissa = torch.where(low, mantissa * 2.0, mantissa)
    e = exponent.to(torch.float64) - low.to(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    y = torch.full_like(s, 1.0 / 23.0)
    for k in range(10, -1, -1):
        y = y.mul_(z).add_(1.0 / (2 * k + 1))
    return e * LN2 + (s * 2.0) * y


def exp64(x: Tensor) -> Tensor:
    """e^x in float64, to a few units in the last place; exp64(0) is exactly 1.

    The argument is clamped to [-708, 709], where the result is a normal float64.
    """
    x = x.clamp(EXP64_MIN, EXP64_MAX)
    k = (x * LOG2_E).round()
    r = x - k * EXP64_LN2_HIGH  # the product is exact
    r = r - k * EXP64_LN2_LOW
    y = torch.full_like(r, EXP64_COEFFICIENTS[0])
    for c in EXP64_COEFFICIENTS[1:]:
        y = y.mul_(r).add_(c)
    return y * pow2(k)


def power(base: float, exponents: Tensor) -> Tensor:
    """base^exponents in float64 as exp(exponent * ln(base)); base > 0, for results well inside the range."""
    return exp64(exponents.to(torch.float64) * log(torch.tensor([base], dtype=torch.float64)))


# pi/2 in three parts of at most 33 bits each, so that n times each is exact for n < 2^20 (fdlibm)
PIO2_PARTS = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
SIN_TERMS = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in range(9, -1, -1))
COS_TERMS = tuple((-1.0) ** k / math.factorial(2 * k) for k in range(9, -1, -1))


def cos_sin(angle: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of float64 angles in radians, 0 <= angle < 2^20, absolute error below 1e-15.

    The angle is reduced to |r| <= pi/4 by multiples of pi/2, then a Taylor polynomial is used.
    """
    n = (angle * (2.0 / math.pi)).round()
    r = angle
    for pio2 in PIO2_PARTS:
        r = r - n * pio2
    z = r * r
    sine, cosine = torch.full_like(r, SIN_TERMS[0]), torch.full_like(r, COS_TERMS[0])
    for s, c in zip(SIN_TERMS[1:], COS_TERMS[1:], strict=True):
        sine = sine.mul_(z).add_(s)
        cosine = cosine.mul_(z).add_(c)
    sine = sine.mul_(r)
    quadrant = n.to(torch.int64) & 3
    odd = (quadrant & 1).bool()
    cos_out = torch.where(odd, sine, cosine)
    sin_out = torch.where(odd, cosine, sine)
    cos_out = torch.where((quadrant == 1) | (quadrant == 2), -cos_out, cos_out)
    sin_out = torch.where(quadrant >= 2, -sin_out, sin_out)
    return cos_out, sin_out


class Exp(Function):
    """`exp` with its derivative: d exp(x) = exp(x) dx."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        y = exp(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * y
