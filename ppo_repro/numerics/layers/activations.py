"""Activation functions: SiLU, the Gaussian error linear units and the hyperbolic tangent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function

from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic import elementwise
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
TANH_MAX = 20.0  # 1 - tanh(20) = 8e-18: 1 in float32
TANH_SERIES = 2.0**-12  # below it x - x^3 / 3 is within 5e-16, relative


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


class ExactSiLU(nn.Module):
    """x / (1 + exp(-x)) by the elementwise law."""

    def forward(self, x: Tensor) -> Tensor:
        return SiLU.apply(x) if torch.is_grad_enabled() else silu(x)


def gated(x: Tensor, gate: Gate) -> Tensor:
    """x g(x) in float64, rounded once to float32; not differentiable."""
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


def tanh(x: Tensor) -> Tensor:
    """(1 - e) / (1 + e) with e = exp(-2 |x|) and the sign of x; float32, relative error below 2^-24 + 1e-11.

    Computed in float64 and rounded once; near zero, where 1 - e would lose digits, as x - x^3 / 3. Odd to the bit.
    """
    a = x.abs().to(torch.float64).clamp_(max=TANH_MAX)
    e = elementwise.exp64(a * -2.0)
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
