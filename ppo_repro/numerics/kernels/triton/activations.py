"""Elementwise kernels: SiLU and the Gaussian error linear units, forward and backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppo_repro.numerics.arithmetic import gates
from ppo_repro.numerics.kernels.triton.functions import exp, normal_cdf, quick_gate, tanh_gate
from ppo_repro.numerics.kernels.triton.launch import WARPS4

LIMIT: tl.constexpr = tl.constexpr(gates.LIMIT)
BLOCK = 1024
KINDS: dict[gates.Gate, int] = {gates.normal_cdf: 0, gates.tanh_gate: 1, gates.quick_gate: 2}


@triton.jit
def silu(x, y, count, BLOCK: tl.constexpr):
    """y = x / (1 + exp(-x))."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < count, other=0.0)
    tl.store(y + i, tl.div_rn(value, exp(-value) + 1.0), mask=i < count)


@triton.jit
def silu_backward(grad, x, dx, count, BLOCK: tl.constexpr):
    """dx = grad s (1 + x (1 - s)) with s = 1 / (1 + exp(-x))."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < count, other=0.0)
    s = tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), exp(-value) + 1.0)
    slope = ((1.0 - s) * value + 1.0) * s
    tl.store(dx + i, tl.load(grad + i, mask=i < count, other=0.0) * slope, mask=i < count)


@triton.jit
def gate(x, KIND: tl.constexpr):
    """g(x) and g'(x) in float64 of one of `KINDS`."""
    if KIND == 0:
        return normal_cdf(x)
    elif KIND == 1:
        return tanh_gate(x)
    else:
        return quick_gate(x)


@triton.jit
def gated(x, y, count, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """y = x g(x), x no lower than -LIMIT."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(x + i, mask=i < count, other=0.0).to(tl.float64)
    wide = tl.where(wide < -LIMIT, -LIMIT, wide)
    g, _ = gate(tl.where(wide > LIMIT, LIMIT, wide), KIND)
    tl.store(y + i, (wide * g).to(tl.float32), mask=i < count)


@triton.jit
def gated_backward(grad, x, dx, count, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """dx = grad (g(x) + x g'(x)), x within +-LIMIT."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(x + i, mask=i < count, other=0.0).to(tl.float64)
    wide = tl.where(wide < -LIMIT, -LIMIT, wide)
    wide = tl.where(wide > LIMIT, LIMIT, wide)
    g, slope = gate(wide, KIND)
    upstream = tl.load(grad + i, mask=i < count, other=0.0).to(tl.float64)
    tl.store(dx + i, ((slope * wide + g) * upstream).to(tl.float32), mask=i < count)


def _programs(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), BLOCK),)


def silu_of(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), float32 of any shape."""
    x = x.contiguous()
    y = torch.empty_like(x)
    silu[_programs(x)](x, y, x.numel(), BLOCK=BLOCK, **WARPS4)
    return y


def silu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """The derivative of `silu_of` times grad, float32."""
    grad, x = grad.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    silu_backward[_programs(x)](grad, x, dx, x.numel(), BLOCK=BLOCK, **WARPS4)
    return dx


def gated_of(x: Tensor, kind: gates.Gate) -> Tensor:
    """x g(x) in float64, rounded once to float32."""
    x = x.contiguous()
    y = torch.empty_like(x)
    gated[_programs(x)](x, y, x.numel(), KIND=KINDS[kind], BLOCK=BLOCK, **WARPS4)
    return y


def gated_gradient(grad: Tensor, x: Tensor, kind: gates.Gate) -> Tensor:
    """The derivative of `gated_of` times grad, float32."""
    grad, x = grad.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    gated_backward[_programs(x)](grad, x, dx, x.numel(), KIND=KINDS[kind], BLOCK=BLOCK, **WARPS4)
    return dx
