"""Gaussian error linear units, y = x g(x), computed in float64 and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function

from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic.gates import LIMIT, Gate, normal_cdf, quick_gate, tanh_gate
from ppo_repro.numerics.kernels import activations
from ppo_repro.numerics.products import array

Kernel = Callable[[np.ndarray, np.ndarray], None]
BackwardKernel = Callable[[np.ndarray, np.ndarray, np.ndarray], None]
KERNELS: dict[Gate, tuple[Kernel, BackwardKernel]] = {
    normal_cdf: (activations.gelu, activations.gelu_backward),
    tanh_gate: (activations.gelu_tanh, activations.gelu_tanh_backward),
    quick_gate: (activations.quick_gelu, activations.quick_gelu_backward),
}


def gated(x: Tensor, gate: Gate) -> Tensor:
    """x g(x), float32; not differentiable."""
    if backend.has_kernels(x):
        y = torch.empty(x.shape)
        KERNELS[gate][0](array(x).reshape(-1), y.numpy().reshape(-1))
        return y
    wide = x.to(torch.float64).clamp_(min=-LIMIT)
    return (wide * gate(wide.clamp(max=LIMIT))[0]).to(torch.float32)


class Gated(Function):
    """y = x g(x), y' = g(x) + x g'(x); float32 in and out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Gate) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gate = gate
        return gated(x, gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if backend.has_kernels(x):
            dx = torch.empty(x.shape)
            KERNELS[ctx.gate][1](array(grad).reshape(-1), array(x).reshape(-1), dx.numpy().reshape(-1))
            return dx, None
        wide = x.to(torch.float64).clamp_(-LIMIT, LIMIT)
        g, slope = ctx.gate(wide)
        return ((slope * wide + g) * grad.to(torch.float64)).to(torch.float32), None


class ExactGELU(nn.Module):
    """x Phi(x): `gelu`."""

    def forward(self, x: Tensor) -> Tensor:
        return Gated.apply(x, normal_cdf) if torch.is_grad_enabled() else gated(x, normal_cdf)


class ExactGELUTanh(nn.Module):
    """The tanh approximation: `gelu_new`, `gelu_pytorch_tanh`, `gelu_fast`, `gelu_accurate`."""

    def forward(self, x: Tensor) -> Tensor:
        return Gated.apply(x, tanh_gate) if torch.is_grad_enabled() else gated(x, tanh_gate)


class ExactQuickGELU(nn.Module):
    """The logistic approximation: `quick_gelu`."""

    def forward(self, x: Tensor) -> Tensor:
        return Gated.apply(x, quick_gate) if torch.is_grad_enabled() else gated(x, quick_gate)
