"""The hyperbolic tangent by the elementwise law."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic.elementwise import exp64
from ppo_repro.numerics.kernels import activations
from ppo_repro.numerics.products import array

TANH_MAX = 20.0  # 1 - tanh(20) = 8e-18: 1 in float32
TANH_SERIES = 2.0**-12  # below it x - x^3 / 3 is within 5e-16, relative


def tanh(x: Tensor) -> Tensor:
    """(1 - e) / (1 + e) with e = exp(-2 |x|) and the sign of x; float32, relative error below 2^-24 + 1e-11.

    Computed in float64 and rounded once; near zero, where 1 - e would lose digits, as x - x^3 / 3. Odd to the bit.
    """
    a = x.abs().to(torch.float64).clamp_(max=TANH_MAX)
    e = exp64(a * -2.0)
    y = torch.where(a < TANH_SERIES, a - a * a * a * (1.0 / 3.0), (1.0 - e) / (1.0 + e))
    return torch.copysign(y.to(torch.float32), x)


class Tanh(Function):
    """`tanh` with its derivative, dx = dy (1 - y^2); float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if backend.has_kernels(x):
            y = torch.empty(x.shape)
            activations.tanh(array(x).reshape(-1), TANH_SERIES, TANH_MAX, y.numpy().reshape(-1))
        else:
            y = tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1.0 - y * y)


class ExactTanh(nn.Module):
    """tanh(x), elementwise; float32 of any shape."""

    def forward(self, x: Tensor) -> Tensor:
        return Tanh.apply(x)
