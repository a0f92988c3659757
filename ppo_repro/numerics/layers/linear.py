"""The modules that take the place of stock layers: same parameters, exact sums, exact gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function

from ppo_repro.errors import NumericsError
from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic import elementwise
from ppo_repro.numerics.arithmetic.grid import OPERAND_BITS, operand_bits, quantise
from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.kernels import norms
from ppo_repro.numerics.layers.silu import SiLU, silu
from ppo_repro.numerics.products import NOTHING, PreparedWeight, array


class ExactModule(nn.Module):
    """A lowered layer. `accumulator` takes its parameter gradients; a layer with no parameter to train has none.

    A linear layer may have its bias frozen, or its weight (`requires_grad`); other layers are trained whole or not.

    The autograd functions keep parameters as they are, not through `save_for_backward`: recomputed layers get
    other tensor objects from there, and the accumulator knows a parameter by its identity.
    """

    accumulator: GradientAccumulator | None = None


class _Linear(Function):
    """y = x W^T + b; dx = dy W; the weight and bias gradients go to the accumulator."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        prepared: PreparedWeight,
        accumulator: GradientAccumulator | None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows)
        ctx.parameters, ctx.prepared, ctx.accumulator, ctx.shape = (weight, bias), prepared, accumulator, x.shape
        return _linear(rows, weight, bias, prepared, x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), (weight, bias) = ctx.saved_tensors, ctx.parameters
        dy = grad.reshape(-1, grad.shape[-1])
        dx = None
        if ctx.needs_input_grad[0]:
            dx = ctx.prepared.contract(dy, weight, 0).view(ctx.shape)
        if ctx.accumulator is not None:
            if ctx.needs_input_grad[1]:
                ctx.accumulator.add_linear(weight, rows, dy)
            if ctx.needs_input_grad[2]:
                ctx.accumulator.add_rows(bias, dy)
        return dx, None, None, None, None


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, prepared: PreparedWeight, shape: torch.Size) -> Tensor:
    return prepared.contract(rows, weight, 1, bias).view(*shape[:-1], -1)


class ExactLinear(ExactModule):
    """`nn.Linear` with exact sums. x [.., K] float32 -> [.., N] float32."""

    def __init__(self, source: nn.Linear, name: str, bits: int = OPERAND_BITS) -> None:
        super().__init__()
        self.weight, self.bias = source.weight, source.bias
        self.prepared = PreparedWeight(name, bits)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # decoding one token, autograd's own work would be a sixth of the time
            return _linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias, self.prepared, x.shape)
        return _Linear.apply(x, self.weight, self.bias, self.prepared, self.accumulator)


def _rms_norm(rows: Tensor, weight: Tensor, eps: float, name: str) -> tuple[Tensor, Tensor]:
    """The norm of each row and 1 / sqrt(mean(x^2) + eps), float64 [n, 1]."""
    size = rows.shape[-1]
    if backend.has_kernels(rows):
        inverse, y = torch.empty(len(rows), 1, dtype=torch.float64), torch.empty(rows.shape)
        if not norms.rms_norm(array(rows), array(weight), eps, operand_bits(size), inverse.numpy()[:, 0], y.numpy()):
            raise NumericsError(f"the input of {name} is not finite")
        return y, inverse
    integers, scale = quantise(rows, operand_bits(size), where=f"the input of {name}")
    mean_square = (integers * integers).sum(-1, keepdim=True) * (scale * scale) / size
    inverse = 1.0 / elementwise.sqrt(mean_square + eps)
    return ((rows.to(torch.float64) * inverse) * weight.to(torch.float64)).to(torch.float32), inverse


class _RMSNorm(Function):
    """y = w x / sqrt(mean(x^2) + eps); exact mean of squares, exact dot product in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, name: str, accumulator: GradientAccumulator | None
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, inverse = _rms_norm(rows, weight, eps, name)
        ctx.save_for_backward(rows, inverse)
        ctx.weight, ctx.accumulator, ctx.shape = weight, accumulator, x.shape
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse = ctx.saved_tensors
        dy = grad.reshape(x.shape)
        if backend.has_kernels(x):
            made = norm_backward(array(dy), array(x), ctx.weight, inverse.numpy()[:, 0], ctx.accumulator)
            dx = torch.from_numpy(made)
        else:
            dx = _norm_backward(dy, x, ctx.weight, inverse, ctx.accumulator)
        return dx.view(ctx.shape), None, None, None, None


def _norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, accumulator: GradientAccumulator | None
) -> Tensor:
    """dx = (w dy - n mean(w dy n)) inverse with n = x inverse; the gradient of w, sum dy n, to the accumulator."""
    size = x.shape[-1]
    bits = operand_bits(size)
    normed = x.to(torch.float64) * inverse
    dy = grad.to(torch.float64)
    weighted = dy * weight.to(torch.float64)
    a, a_scale = quantise(weighted, bits, where="the gradient of a norm")
    b, b_scale = quantise(normed, bits)
    dot = (a * b).sum(-1, keepdim=True) * (a_scale * b_scale) / size
    if accumulator is not None:
        accumulator.add_rows(weight, dy * normed)
    return ((weighted - normed * dot) * inverse).to(torch.float32)


def norm_backward(
    grad: np.ndarray, x: np.ndarray, weight: Tensor, inverse: np.ndarray, accumulator: GradientAccumulator | None
) -> np.ndarray:
    """`_norm_backward` by a kernel; grad, x [n, H] float32, inverse [n] float64."""
    dx = np.empty_like(x)
    sums, limit, unit = np.empty(0, np.int64), None, 0.0
    if accumulator is not None:
        name = accumulator.names[id(weight)]
        limit = accumulator.grid(name)
        # without a grid only the exponent is wanted, and the sums are thrown away
        sums = np.zeros(x.shape[1], np.int64) if limit is None else accumulator.sum_of(name).numpy()
        unit = 0.0 if limit is None else 2.0 ** (accumulator.total_bits - limit)
    largest = norms.rms_norm_backward(
        grad, x, array(weight), inverse, operand_bits(x.shape[1]), dx,
        norms.NO_GRID if limit is None else limit, unit, sums,
    )  # fmt: skip
    if largest == norms.NOT_FINITE:
        raise NumericsError("the gradient of a norm is not finite; lower the learning rate")
    if accumulator is not None and largest != NOTHING:
        accumulator.observe(name, largest)
    return dx


class ExactRMSNorm(ExactModule):
    """Root-mean-square norm of Llama and Qwen with exact sums. Zhang and Sennrich, 2019."""

    def __init__(self, weight: nn.Parameter, eps: float, name: str) -> None:
        super().__init__()
        self.weight, self.eps, self.name = weight, eps, name

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return _rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps, self.name)[0].view(x.shape)
        return _RMSNorm.apply(x, self.weight, self.eps, self.name, self.accumulator)


class _Embedding(Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None, accumulator: GradientAccumulator | None
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding_idx, ctx.accumulator = weight, padding_idx, accumulator
        return weight[ids]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        if ctx.accumulator is not None:
            if ctx.padding_idx is not None:  # as in nn.Embedding, this row takes no gradient
                grad = grad.masked_fill((ids == ctx.padding_idx)[..., None], 0.0)
            ctx.accumulator.add_rows(ctx.weight, grad.reshape(-1, grad.shape[-1]), ids.reshape(-1))
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
        return SiLU.apply(x) if torch.is_grad_enabled() else silu(x)


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
