"""Logistic function and softplus by the elementwise law, accurate at both ends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ppo_repro.numerics.arithmetic import elementwise

SERIES_END = 0.41421356  # sqrt(2) - 1; up to here the sum 1 + e would lose digits of e
# where the smaller of sigma(x) and sigma(-x) is still a normal number of the type
LARGEST_ARGUMENT = {torch.float32: 87.0, torch.float64: 708.0}


def log1p(e: Tensor) -> Tensor:
    """ln(1 + e) of float64 in [0, 1], to a few units in the last place: 2 artanh(e / (2 + e)) for small e."""
    s = e / (e + 2.0)
    z = s * s
    y = torch.full_like(s, 1.0 / 23.0)
    for k in range(10, -1, -1):
        y = y.mul_(z).add_(1.0 / (2 * k + 1))
    return torch.where(e <= SERIES_END, s * 2.0 * y, elementwise.log(e + 1.0))


def _exp_of_minus_magnitude(x: Tensor) -> Tensor:
    """exp(-|x|) as float64; |x| is clamped so that the result is a normal number of the type of x."""
    return elementwise.exp64(-x.to(torch.float64).abs().clamp(max=LARGEST_ARGUMENT[x.dtype]))


def sigmoid(x: Tensor) -> Tensor:
    """sigma(x) = 1 / (1 + exp(-x)), of the type of x, never 0: the argument is clamped at -87 (float64: -708)."""
    e = _exp_of_minus_magnitude(x)
    return (torch.where(x >= 0, 1.0, e) / (e + 1.0)).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """ln(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)), of the type of x (float32 or float64); never 0, never overflows.

    Relative error below 1e-15 before rounding to that type.
    """
    return (x.to(torch.float64).clamp(min=0.0) + log1p(_exp_of_minus_magnitude(x))).to(x.dtype)


class Softplus(Function):
    """`softplus` with its derivative, `sigmoid`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return softplus(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * sigmoid(x)
