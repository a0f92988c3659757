"""Linear layers with exact sums and exact gradients, as `nn.Linear` and as GPT-2's `Conv1D`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from transformers.pytorch_utils import Conv1D

from ppo_repro.numerics.gradient_bins import Gradients
from ppo_repro.numerics.products import PreparedWeight


class ExactModule(nn.Module):
    """A lowered layer. `accumulator` takes its parameter gradients; a layer with no parameter to train has none.

    A linear layer may have its bias frozen, or its weight (`requires_grad`); other layers are trained whole or not.

    The autograd functions keep parameters as they are, not through `save_for_backward`: recomputed layers get
    other tensor objects from there, but the accumulator knows a parameter by its identity.
    """

    accumulator: Gradients | None = None


def _product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, prepared: PreparedWeight, transposed: bool, shape: torch.Size
) -> Tensor:
    return prepared.contract(rows, weight, 0 if transposed else 1, bias).view(*shape[:-1], -1)


class _Linear(Function):
    """y = x W^T + b and dx = dy W, with W^T for W where it is stored transposed.

    The gradients of weight and bias go to the accumulator.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        prepared: PreparedWeight,
        accumulator: Gradients | None,
        transposed: bool,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows)
        ctx.parameters, ctx.prepared, ctx.accumulator = (weight, bias), prepared, accumulator
        ctx.transposed, ctx.shape = transposed, x.shape
        return _product(rows, weight, bias, prepared, transposed, x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), (weight, bias) = ctx.saved_tensors, ctx.parameters
        dy = grad.reshape(-1, grad.shape[-1])
        dx = None
        if ctx.needs_input_grad[0]:
            dx = ctx.prepared.contract(dy, weight, 1 if ctx.transposed else 0).view(ctx.shape)
        if ctx.accumulator is not None:
            if ctx.needs_input_grad[1]:
                ctx.accumulator.add_linear(weight, rows, dy, ctx.transposed)
            if ctx.needs_input_grad[2]:
                ctx.accumulator.add_rows(bias, dy)
        return dx, None, None, None, None, None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    prepared: PreparedWeight,
    accumulator: Gradients | None,
    transposed: bool = False,
) -> Tensor:
    """x W^T + b, or x W + b for a `transposed` weight; x [.., K] float32 -> [.., N] float32. Differentiable."""
    if not torch.is_grad_enabled():  # autograd's own work would be a sixth of the time of decoding one token
        rows = x.reshape(-1, x.shape[-1])
        return _product(rows, weight, bias, prepared, transposed, x.shape)
    return _Linear.apply(x, weight, bias, prepared, accumulator, transposed)


class _Matrix(ExactModule):
    """A linear layer, x [.., K] float32 -> [.., N] float32."""

    transposed: ClassVar[bool]  # whether the weight is [K, N] instead of [N, K]

    def __init__(self, source: nn.Linear | Conv1D, name: str) -> None:
        super().__init__()
        self.weight, self.bias = source.weight, source.bias
        self.prepared = PreparedWeight(name)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.prepared, self.accumulator, self.transposed)


class ExactLinear(_Matrix):
    """`nn.Linear` with exact sums: y = x W^T + b, W [N, K]."""

    transposed = False


class ExactConv1D(_Matrix):
    """GPT-2's `Conv1D` with exact sums: y = x W + b, W [K, N]."""

    transposed = True
