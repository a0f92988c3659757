"""Norms beside the plain RMSNorm: layer norm, and Gemma's RMSNorm whose weight counts from one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ppo_repro.numerics import elementwise
from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.grid import MANTISSA_BITS, ceil_log2, operand_bits, quantise
from ppo_repro.numerics.layers import ExactModule


def row_mean(x: Tensor, where: str = "a number") -> Tensor:
    """Mean of each row, float64 [.., 1], by an exact sum on the widest grid that the row's length allows."""
    size = x.shape[-1]
    integers, scale = quantise(x, MANTISSA_BITS - ceil_log2(size), where=where)
    return integers.sum(-1, keepdim=True) * scale / size


def row_mean_square(x: Tensor, where: str = "a number") -> Tensor:
    """Mean of x_k^2 over each row, float64 [.., 1], by an exact sum of squares."""
    size = x.shape[-1]
    integers, scale = quantise(x, operand_bits(size), where=where)
    return (integers * integers).sum(-1, keepdim=True) * (scale * scale) / size


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Mean of a_k b_k over each row, float64 [.., 1], by an exact sum of products."""
    size = a.shape[-1]
    bits = operand_bits(size)
    (x, x_scale), (y, y_scale) = quantise(a, bits), quantise(b, bits)
    return (x * y).sum(-1, keepdim=True) * (x_scale * y_scale) / size


class _LayerNorm(Function):
    """y = w n + b, n = (x - mean) r, 1 / r = sqrt(var + eps); dx = r (w dy - mean(w dy) - n mean(w dy n))."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        name: str,
        accumulator: GradientAccumulator | None,
    ) -> Tensor:
        mean = row_mean(x, f"the input of {name}")
        centred = x.to(torch.float64) - mean
        inverse = 1.0 / elementwise.sqrt(row_mean_square(centred) + eps)
        ctx.save_for_backward(x, mean, inverse)
        ctx.parameters, ctx.accumulator = (weight, bias), accumulator
        return ((centred * inverse) * weight.to(torch.float64) + bias.to(torch.float64)).to(torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, mean, inverse), (weight, bias) = ctx.saved_tensors, ctx.parameters
        normed, dy = (x.to(torch.float64) - mean) * inverse, grad.to(torch.float64)
        weighted = dy * weight.to(torch.float64)
        dx = (weighted - row_mean(weighted, "the gradient of a norm") - normed * row_dot(weighted, normed)) * inverse
        if ctx.accumulator is not None:
            size = dy.shape[-1]
            ctx.accumulator.add_rows(weight, (dy * normed).reshape(-1, size))
            ctx.accumulator.add_rows(bias, dy.reshape(-1, size))
        return dx.to(torch.float32), None, None, None, None, None


class ExactLayerNorm(ExactModule):
    """`nn.LayerNorm` over the last dimension with exact mean and variance. Ba et al., 2016."""

    def __init__(self, source: nn.LayerNorm, name: str) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.name = source.weight, source.bias, source.eps, name

    def forward(self, x: Tensor) -> Tensor:
        return _LayerNorm.apply(x, self.weight, self.bias, self.eps, self.name, self.accumulator)


class _GemmaRMSNorm(Function):
    """y = (1 + w) n, n = x r, 1 / r = sqrt(mean(x^2) + eps); dx = r ((1 + w) dy - n mean((1 + w) dy n))."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, name: str, accumulator: GradientAccumulator | None
    ) -> Tensor:
        inverse = 1.0 / elementwise.sqrt(row_mean_square(x, f"the input of {name}") + eps)
        ctx.save_for_backward(x, inverse)
        ctx.weight, ctx.accumulator = weight, accumulator
        return ((x.to(torch.float64) * inverse) * (weight.to(torch.float64) + 1.0)).to(torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, inverse), weight = ctx.saved_tensors, ctx.weight
        normed, dy = x.to(torch.float64) * inverse, grad.to(torch.float64)
        weighted = dy * (weight.to(torch.float64) + 1.0)
        dx = (weighted - normed * row_dot(weighted, normed)) * inverse
        if ctx.accumulator is not None:
            ctx.accumulator.add_rows(weight, (dy * normed).reshape(-1, dy.shape[-1]))
        return dx.to(torch.float32), None, None, None, None


class ExactGemmaRMSNorm(ExactModule):
    """Root-mean-square norm of Gemma, whose factor is 1 + weight, with exact sums."""

    def __init__(self, weight: nn.Parameter, eps: float, name: str) -> None:
        super().__init__()
        self.weight, self.eps, self.name = weight, eps, name

    def forward(self, x: Tensor) -> Tensor:
        return _GemmaRMSNorm.apply(x, self.weight, self.eps, self.name, self.accumulator)
