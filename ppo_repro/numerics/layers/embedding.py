"""Layers that one family alone has: GPT-2's transposed linear layer, Gemma's scaled embedding."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from torch.autograd import Function
from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding
from transformers.pytorch_utils import Conv1D

from ppo_repro.numerics.arithmetic.grid import OPERAND_BITS
from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.layers.linear import ExactEmbedding, ExactModule
from ppo_repro.numerics.products import PreparedWeight


class _Conv1D(Function):
    """y = x W + b with W [K, N]; dx = dy W^T; the weight and bias gradients go to the accumulator."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        prepared: PreparedWeight,
        accumulator: GradientAccumulator | None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = prepared.contract(rows, weight, 0, bias)
        ctx.save_for_backward(rows)
        ctx.parameters, ctx.prepared, ctx.accumulator, ctx.shape = (weight, bias), prepared, accumulator, x.shape
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), (weight, bias) = ctx.saved_tensors, ctx.parameters
        dy = grad.reshape(-1, grad.shape[-1])
        dx = None
        if ctx.needs_input_grad[0]:
            dx = ctx.prepared.contract(dy, weight, 1).view(ctx.shape)
        if ctx.accumulator is not None:
            if ctx.needs_input_grad[1]:
                ctx.accumulator.add_linear(weight, rows, dy, transposed=True)
            if ctx.needs_input_grad[2]:
                ctx.accumulator.add_rows(bias, dy)
        return dx, None, None, None, None


class ExactConv1D(ExactModule):
    """GPT-2's `Conv1D`, a linear layer of weight [K, N], with exact sums. x [.., K] float32 -> [.., N] float32."""

    def __init__(self, source: Conv1D, name: str, bits: int = OPERAND_BITS) -> None:
        super().__init__()
        self.weight, self.bias = source.weight, source.bias
        self.prepared = PreparedWeight(name, bits)

    def forward(self, x: Tensor) -> Tensor:
        return _Conv1D.apply(x, self.weight, self.bias, self.prepared, self.accumulator)


class ExactScaledEmbedding(ExactEmbedding):
    """Gemma's token embedding times sqrt(H), rounded to float32 as there; ids [..] int64 -> [.., H] float32."""

    def __init__(self, source: GemmaTextScaledWordEmbedding) -> None:
        super().__init__(source)
        self.scale = float(cast(Tensor, source.embed_scale))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale
