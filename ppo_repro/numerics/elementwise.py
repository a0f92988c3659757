"""Compute elementary functions of tensors by the C kernels: the same bits on every machine, for every element.

The library's exp, log, cos, sin and sqrt depend on the instruction set, the vector width or an element's position.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ppo_repro.numerics import library
from ppo_repro.numerics.interface import pointer

_NAMES = {torch.float32: "float32", torch.float64: "float64"}
EXP_MIN, EXP_MAX = -87.0, 88.0  # e^x is a normal float32
# where 1 / (1 + e^-x) and ln(1 + e^x) are still normal numbers of the type
_LEAST = {torch.float32: EXP_MIN, torch.float64: -708.0}


def _mapped(function: str, x: Tensor) -> Tensor:
    """Apply a function of elementwise.c to each element, in the dtype of x. Raises TypeError for another dtype."""
    kernels, name = library.load(), f"{function}_{_NAMES.get(x.dtype, x.dtype)}"
    if not hasattr(kernels, name):
        raise TypeError(f"{function} takes float32 here, and got {str(x.dtype).removeprefix('torch.')}; convert it")
    x = x.detach().contiguous()
    y = torch.empty_like(x)
    getattr(kernels, name)(pointer(x), pointer(y), x.numel())
    return y


def exp(x: Tensor) -> Tensor:
    """Return e^x of float32, within 1.01 ulp. x is clamped to [-87, 88], so e^x is never 0 or infinite; exp(0) = 1."""
    return _mapped("exp", x.to(torch.float32).clamp(EXP_MIN, EXP_MAX))


def expm1(x: Tensor) -> Tensor:
    """Return e^x - 1 of float32, within 1 ulp; expm1(0) is exactly 0. x is clamped to [-87, 88]."""
    x64 = x.detach().to(torch.float64).clamp(EXP_MIN, EXP_MAX)
    series = torch.ones_like(x64)
    # x (1 + x/2 (1 + x/3 (1 + ...))), whose remainder for |x| <= 1 is below 2^-60 of the sum
    for n in range(20, 1, -1):
        series = 1.0 + x64 * series / n
    return torch.where(x64.abs() <= 1.0, x64 * series, exp64(x64) - 1.0).to(torch.float32)


def exp64(x: Tensor) -> Tensor:
    """Return e^x of float64, within 1 ulp; exp64(0) is exactly 1. x is clamped to [-708, 709]."""
    return _mapped("exp", x.to(torch.float64))


def log(x: Tensor) -> Tensor:
    """Return ln(x) of normal positive float64, within 1 ulp."""
    return _mapped("log", x.to(torch.float64))


def sqrt(x: Tensor) -> Tensor:
    """Return the correctly rounded square root of float32 or float64 by NumPy, because torch may round otherwise."""
    return torch.from_numpy(np.sqrt(x.detach().numpy()))


def cos_sin(angle: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of float64 angles in radians, 0 <= angle < 2^20, absolute error below 2e-16."""
    angle = angle.detach().to(torch.float64).contiguous()
    cosine, sine = torch.empty_like(angle), torch.empty_like(angle)
    library.load().sin_cos_float64(pointer(angle), pointer(sine), pointer(cosine), angle.numel())
    return cosine, sine


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x) of float32 or float64, computed in float64; never 0: x is at least -87 (float64: -708)."""
    return _mapped("sigmoid", x.to(torch.float64).clamp(min=_LEAST[x.dtype])).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """Return ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|), computed in float64; never 0, x is clamped as in `sigmoid`."""
    return _mapped("softplus", x.to(torch.float64).clamp(min=_LEAST[x.dtype])).to(x.dtype)


class _Differentiable(Function):
    """Differentiable y = f(x) with dy = slope(x, y) dx."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, f: Callable[[Tensor], Tensor], slope: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        y = f(x)
        ctx.save_for_backward(x, y)
        ctx.slope = slope
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.slope(*ctx.saved_tensors), None, None


def differentiable_exp(x: Tensor) -> Tensor:
    """Return `exp` with its derivative, exp(x)."""
    return _Differentiable.apply(x, exp, lambda x, y: y)


def differentiable_softplus(x: Tensor) -> Tensor:
    """Return `softplus` with its derivative, sigmoid(x)."""
    return _Differentiable.apply(x, softplus, lambda x, y: sigmoid(x))


def differentiable_sigmoid(x: Tensor) -> Tensor:
    """Return `sigmoid` with its derivative, sigmoid(x) sigmoid(-x)."""
    return _Differentiable.apply(x, sigmoid, lambda x, y: y * sigmoid(-x))


def differentiable_sqrt(x: Tensor) -> Tensor:
    """Return `sqrt` with its derivative, 1 / (2 sqrt(x))."""
    return _Differentiable.apply(x, sqrt, lambda x, y: 0.5 / y)


def differentiable_log(x: Tensor) -> Tensor:
    """Return ln(x) of float32 or float64, computed in float64, with its derivative 1/x; -inf at 0, NaN below."""
    return _Differentiable.apply(x, _log_anywhere, lambda x, y: 1.0 / x)


def _log_anywhere(x: Tensor) -> Tensor:
    is_inside = (x > 0) & (x < torch.inf)
    outside = torch.where(x == 0, -torch.inf, torch.where(x > 0, torch.inf, torch.nan))
    return torch.where(is_inside, log(torch.where(is_inside, x, 1.0)), outside).to(x.dtype)


def differentiable_tanh(x: Tensor) -> Tensor:
    """Return tanh(x) of float32, within 1.4 ulp, with its derivative 1 - tanh(x)^2."""
    return _Differentiable.apply(x, partial(_mapped, "tanh"), lambda x, y: 1.0 - y * y)
