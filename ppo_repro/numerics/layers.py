"""The modules that take the place of stock layers: same parameters, exact sums, exact gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ppo_repro.numerics import elementwise
from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.grid import OPERAND_BITS, contract, operand_bits, quantise

Grid = tuple[Tensor, Tensor]


class ExactModule(nn.Module):
    """A lowered layer. `accumulator` takes its parameter gradients; frozen models have none."""

    accumulator: GradientAccumulator | None = None


class WeightGrids:
    """The grids of a weight matrix along its rows and its columns, made anew when the weight changes."""

    def __init__(self) -> None:
        self._made_from = (0, -1)
        self._grids: dict[int, Grid] = {}

    def get(self, weight: Tensor, dim: int) -> Grid:
        """`quantise` of `weight` [N, K] along `dim`, transposed to [K, N] for dim 0."""
        # in-place changes count up the version; other storage under the same parameter shows in the address
        made_from = (weight.data_ptr(), weight._version)
        if made_from != self._made_from:
            self._grids, self._made_from = {}, made_from
        if dim not in self._grids:
            matrix = weight.detach() if dim == 1 else weight.detach().t()
            self._grids[dim] = quantise(matrix, operand_bits(matrix.shape[1]))
        return self._grids[dim]


class _Linear(Function):
    """y = x W^T + b; dx = dy W; the weight and bias gradients go to the accumulator."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        grids: WeightGrids,
        accumulator: GradientAccumulator | None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = contract(quantise(rows, operand_bits(weight.shape[1])), grids.get(weight, 1))
        if bias is not None:
            y = y + bias
        ctx.save_for_backward(rows, weight, bias)
        ctx.grids, ctx.accumulator, ctx.shape = grids, accumulator, x.shape
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias = ctx.saved_tensors
        dy = grad.reshape(-1, grad.shape[-1])
        dx = None
        if ctx.needs_input_grad[0]:
            dx = contract(quantise(dy, operand_bits(weight.shape[0])), ctx.grids.get(weight, 0)).view(ctx.shape)
        if ctx.accumulator is not None:
            ctx.accumulator.add_linear(weight, quantise(rows, OPERAND_BITS), dy)
            if bias is not None:
                ctx.accumulator.add_rows(bias, dy.to(torch.float64))
        return dx, None, None, None, None


class ExactLinear(ExactModule):
    """`nn.Linear` with exact sums. x [.., K] float32 -> [.., N] float32."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = source.weight, source.bias
        self.grids = WeightGrids()

    def forward(self, x: Tensor) -> Tensor:
        return _Linear.apply(x, self.weight, self.bias, self.grids, self.accumulator)


class _RMSNorm(Function):
    """y = w x / sqrt(mean(x^2) + eps); exact mean of squares, exact dot product in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, accumulator: GradientAccumulator | None) -> Tensor:
        size = x.shape[-1]
        integers, scale = quantise(x, operand_bits(size))
        mean_square = (integers * integers).sum(-1, keepdim=True) * (scale * scale) / size
        inverse = 1.0 / elementwise.sqrt(mean_square + eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.accumulator = accumulator
        return ((x.to(torch.float64) * inverse) * weight.to(torch.float64)).to(torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        size = x.shape[-1]
        bits = operand_bits(size)
        normed = x.to(torch.float64) * inverse
        dy = grad.to(torch.float64)
        weighted = dy * weight.to(torch.float64)
        a, a_scale = quantise(weighted, bits)
        b, b_scale = quantise(normed, bits)
        dot = (a * b).sum(-1, keepdim=True) * (a_scale * b_scale) / size
        dx = (weighted - normed * dot) * inverse
        if ctx.accumulator is not None:
            ctx.accumulator.add_rows(weight, (dy * normed).reshape(-1, size))
        return dx.to(torch.float32), None, None, None


class ExactRMSNorm(ExactModule):
    """Root-mean-square norm of Llama and Qwen with exact sums. Zhang and Sennrich, 2019."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps, self.accumulator)


class _Embedding(Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None, accumulator: GradientAccumulator | None
    ) -> Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.padding_idx, ctx.accumulator = padding_idx, accumulator
        return weight[ids]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ids, weight = ctx.saved_tensors
        if ctx.accumulator is not None:
            if ctx.padding_idx is not None:  # as in nn.Embedding, this row takes no gradient
                grad = grad.masked_fill((ids == ctx.padding_idx)[..., None], 0.0)
            ctx.accumulator.add_embedding(weight, ids.reshape(-1), grad.reshape(-1, grad.shape[-1]))
        return None, None, None, None


class ExactEmbedding(ExactModule):
    """Token embedding; ids [..] int64 -> [.., H] float32."""

    def __init__(self, source: nn.Embedding) -> None:
        super().__init__()
        self.weight, self.padding_idx = source.weight, source.padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        return _Embedding.apply(ids, self.weight, self.padding_idx, self.accumulator)


class ExactSiLU(nn.Module):
    """x / (1 + exp(-x)) by the elementwise law."""

    def forward(self, x: Tensor) -> Tensor:
        return elementwise.SiLU.apply(x)


class ExactRotary(nn.Module):
    """Cosine and sine tables of rotary positions, [.., D] each, from float64 angles. Su et al., 2021."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, inverse_frequencies: Tensor, scaling: float, max_context: int) -> None:
        super().__init__()
        angles = torch.arange(max_context, dtype=torch.float64)[:, None] * inverse_frequencies
        cosine, sine = elementwise.cos_sin(torch.cat([angles, angles], -1))
        self.register_buffer("cosine", (cosine * scaling).to(torch.float32), persistent=False)
        self.register_buffer("sine", (sine * scaling).to(torch.float32), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.cosine[position_ids], self.sine[position_ids]
