"""SiLU by the elementwise law."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic import elementwise
from ppo_repro.numerics.kernels import activations
from ppo_repro.numerics.products import array


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), float32; not differentiable."""
    if not backend.has_kernels(x):
        return x / (elementwise.exp(-x) + 1.0)
    y = torch.empty(x.shape)
    activations.silu(array(x).reshape(-1), y.numpy().reshape(-1))
    return y


class SiLU(Function):
    """silu(x) = x / (1 + exp(-x)), float32; derivative s (1 + x (1 - s)) with s = 1 / (1 + exp(-x))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return silu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if not backend.has_kernels(x):
            s = 1.0 / (elementwise.exp(-x) + 1.0)
            return grad * (1.0 - s).mul_(x).add_(1.0).mul_(s)
        dx = torch.empty(x.shape)
        activations.silu_backward(array(grad).reshape(-1), array(x).reshape(-1), dx.numpy().reshape(-1))
        return dx
