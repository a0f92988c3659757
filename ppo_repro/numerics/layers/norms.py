"""Norms with exact sums: root mean square, with Gemma's offset or without, and layer norm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function

from ppo_repro.errors import NumericsError
from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic import elementwise
from ppo_repro.numerics.arithmetic.grid import PRODUCT_BITS
from ppo_repro.numerics.gradient_bins import GradientBins, Gradients
from ppo_repro.numerics.gradients import PIECE, GradientAccumulator
from ppo_repro.numerics.kernels import layer_norm, norms
from ppo_repro.numerics.kernels.layer_norm import IntegerSums
from ppo_repro.numerics.layers.linear import ExactModule
from ppo_repro.numerics.layers.row_sums import mean_bits, row_dot, row_mean, row_mean_square
from ppo_repro.numerics.products import array

_GRADIENT = "the gradient of a norm"


def _not_finite(where: str) -> NumericsError:
    return NumericsError(f"{where} is not finite; lower the learning rate or check the weights")


def input_not_finite(name: str) -> NumericsError:
    """What to raise where the input of the norm `name` is not finite."""
    return _not_finite(f"the input of {name}")


def _pieces(rows: int) -> Iterator[slice]:
    """Slices of so many rows that the sums of their integer gradients fit into an int64."""
    return (slice(start, min(start + PIECE, rows)) for start in range(0, rows, PIECE))


def _sums_of(accumulator: GradientAccumulator | None, parameter: Tensor, rows: slice) -> IntegerSums:
    """Where a kernel adds the gradient of a norm's parameter from these rows."""
    if accumulator is None:
        return IntegerSums(norms.NO_GRID, 0.0, np.empty(0, np.int64))
    name = accumulator.names[id(parameter)]
    limit = accumulator.grid(name)
    if limit is None:  # only the exponent is wanted; nothing will be added
        return IntegerSums(norms.NO_GRID, 0.0, np.zeros(len(parameter), np.int64))
    sums = accumulator.sum_of(name, rows.stop - rows.start).numpy()
    return IntegerSums(limit, 2.0 ** (PRODUCT_BITS - limit), sums)


def _observe(accumulator: GradientAccumulator | None, parameter: Tensor, largest: int) -> None:
    if accumulator is not None and largest != norms.NO_GRID:
        accumulator.observe(accumulator.names[id(parameter)], largest)


def rms_normed(x: np.ndarray, factor: np.ndarray, eps: float, name: str) -> tuple[np.ndarray, np.ndarray]:
    """y = factor x inverse by a kernel, and inverse = 1 / sqrt(mean(x^2) + eps), float64 [n]; x [n, H] float32.

    The factor [H] is float32 or float64. Raises NumericsError naming the module where x is not finite.
    """
    y, inverse = np.empty_like(x), np.empty(len(x))
    if not norms.rms_norm(x, factor, eps, inverse, y):
        raise input_not_finite(name)
    return y, inverse


def rms_norm_backward(
    grad: np.ndarray,
    x: np.ndarray,
    weight: Tensor,
    factor: np.ndarray,
    inverse: np.ndarray,
    accumulator: Gradients | None,
) -> np.ndarray:
    """The gradient of x by a kernel, that of the weight to the accumulator; inverse as of `rms_normed`.

    Raises NumericsError where the gradient is not finite.
    """
    if isinstance(accumulator, GradientBins):
        accumulator.add_rows(weight, torch.from_numpy(grad.astype(np.float64) * (x * inverse[:, None])))
        accumulator = None
    dx = np.empty_like(x)
    for rows in _pieces(len(x)):
        sums = _sums_of(accumulator, weight, rows)
        largest = norms.rms_norm_backward(grad[rows], x[rows], factor, inverse[rows], dx[rows], *sums)
        if largest == norms.NOT_FINITE:
            raise _not_finite(_GRADIENT)
        _observe(accumulator, weight, largest)
    return dx


def _factor(weight: Tensor, offset: float) -> Tensor:
    """offset + weight, float64; without an offset the weight as it is, float32, negative zeros included."""
    return weight.to(torch.float64) + offset if offset else weight


def _rms_norm(rows: Tensor, factor: Tensor, eps: float, name: str) -> tuple[Tensor, Tensor]:
    """The norm of each row and 1 / sqrt(mean(x^2) + eps), float64 [n, 1]."""
    if backend.has_kernels(rows):
        y, inverse = rms_normed(array(rows), array(factor), eps, name)
        return torch.from_numpy(y), torch.from_numpy(inverse)[:, None]
    scale = 1.0 / elementwise.sqrt(row_mean_square(rows, f"the input of {name}") + eps)
    return ((rows.to(torch.float64) * scale) * factor.to(torch.float64)).to(torch.float32), scale


class _RMSNorm(Function):
    """y = f n, f = offset + w, n = x r, 1 / r = sqrt(mean(x^2) + eps); dx = r (f dy - n mean(f dy n)), df = dw."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        factor: Tensor,
        eps: float,
        name: str,
        accumulator: Gradients | None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, inverse = _rms_norm(rows, factor, eps, name)
        ctx.save_for_backward(rows, inverse)
        ctx.weight, ctx.factor, ctx.accumulator, ctx.shape = weight, factor, accumulator, x.shape
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, inverse), weight, factor = ctx.saved_tensors, ctx.weight, ctx.factor
        dy = grad.reshape(x.shape)
        if backend.has_kernels(x):
            found = rms_norm_backward(
                array(dy), array(x), weight, array(factor), inverse.numpy()[:, 0], ctx.accumulator
            )
            return torch.from_numpy(found).view(ctx.shape), None, None, None, None, None
        normed, dy = x.to(torch.float64) * inverse, dy.to(torch.float64)
        weighted = dy * factor.to(torch.float64)
        dx = (weighted - normed * row_dot(weighted, normed, _GRADIENT)) * inverse
        if ctx.accumulator is not None:
            ctx.accumulator.add_rows(weight, dy * normed)
        return dx.to(torch.float32).view(ctx.shape), None, None, None, None, None


class ExactRMSNorm(ExactModule):
    """Root-mean-square norm of Llama, Qwen and Mistral with exact sums. Zhang and Sennrich, 2019."""

    offset: ClassVar[float] = 0.0  # of the weight

    def __init__(self, weight: nn.Parameter, eps: float, name: str) -> None:
        super().__init__()
        self.weight, self.eps, self.name = weight, eps, name

    def factor(self) -> Tensor:
        """What the normed rows are multiplied by, [H] float32 or float64."""
        return _factor(self.weight.detach(), self.offset)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            rows = x.reshape(-1, x.shape[-1])
            return _rms_norm(rows, self.factor(), self.eps, self.name)[0].view(x.shape)
        return _RMSNorm.apply(x, self.weight, self.factor(), self.eps, self.name, self.accumulator)


class ExactGemmaRMSNorm(ExactRMSNorm):
    """Root-mean-square norm of Gemma, whose factor is 1 + weight, with exact sums."""

    offset = 1.0


def layer_normed(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float, name: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The layer norm of each row by a kernel, the rows' means and 1 / sqrt(var + eps); x [n, H] float32.

    Raises NumericsError naming the module where x is not finite.
    """
    count, size = x.shape
    mean, inverse, y = np.empty(count), np.empty(count), np.empty_like(x)
    if not layer_norm.layer_norm(x, weight, bias, eps, mean_bits(size), mean, inverse, y):
        raise input_not_finite(name)
    return y, mean, inverse


def layer_norm_backward(
    grad: np.ndarray,
    x: np.ndarray,
    weight: Tensor,
    bias: Tensor,
    mean: np.ndarray,
    inverse: np.ndarray,
    accumulator: Gradients | None,
) -> np.ndarray:
    """The gradient of x by a kernel, those of weight and bias to the accumulator; mean, inverse of `layer_normed`.

    Raises NumericsError where the gradient is not finite.
    """
    if isinstance(accumulator, GradientBins):
        wide = grad.astype(np.float64)
        accumulator.add_rows(weight, torch.from_numpy(wide * ((x - mean[:, None]) * inverse[:, None])))
        accumulator.add_rows(bias, torch.from_numpy(wide))
        accumulator = None
    dx, bits = np.empty_like(x), mean_bits(x.shape[1])
    for rows in _pieces(len(x)):
        sums = _sums_of(accumulator, weight, rows), _sums_of(accumulator, bias, rows)
        arrays = grad[rows], x[rows], array(weight), mean[rows], inverse[rows]
        tops = layer_norm.layer_norm_backward(*arrays, bits, dx[rows], *sums)
        if norms.NOT_FINITE in tops:
            raise _not_finite(_GRADIENT)
        for parameter, largest in zip((weight, bias), tops, strict=True):
            _observe(accumulator, parameter, largest)
    return dx


def _layer_norm(rows: Tensor, weight: Tensor, bias: Tensor, eps: float, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of each row, the rows' means and 1 / sqrt(var + eps), float64 [n, 1]."""
    if backend.has_kernels(rows):
        results = layer_normed(array(rows), array(weight), array(bias), eps, name)
        y, mean, inverse = (torch.from_numpy(result) for result in results)
        return y, mean[:, None], inverse[:, None]
    mean = row_mean(rows, f"the input of {name}")
    centred = rows.to(torch.float64) - mean
    inverse = 1.0 / elementwise.sqrt(row_mean_square(centred) + eps)
    y = ((centred * inverse) * weight.to(torch.float64) + bias.to(torch.float64)).to(torch.float32)
    return y, mean, inverse


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
        accumulator: Gradients | None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, mean, inverse = _layer_norm(rows, weight, bias, eps, name)
        ctx.save_for_backward(rows, mean, inverse)
        ctx.parameters, ctx.accumulator, ctx.shape = (weight, bias), accumulator, x.shape
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, mean, inverse), (weight, bias) = ctx.saved_tensors, ctx.parameters
        dy = grad.reshape(x.shape)
        if backend.has_kernels(x):
            gradient = layer_norm_backward(
                array(dy), array(x), weight, bias, mean.numpy()[:, 0], inverse.numpy()[:, 0], ctx.accumulator
            )
            return torch.from_numpy(gradient).view(ctx.shape), None, None, None, None, None
        normed, dy = (x.to(torch.float64) - mean) * inverse, dy.to(torch.float64)
        weighted = dy * weight.to(torch.float64)
        dx = (weighted - row_mean(weighted, _GRADIENT) - normed * row_dot(weighted, normed, _GRADIENT)) * inverse
        if ctx.accumulator is not None:
            ctx.accumulator.add_rows(weight, dy * normed)
            ctx.accumulator.add_rows(bias, dy)
        return dx.to(torch.float32).view(ctx.shape), None, None, None, None, None


class ExactLayerNorm(ExactModule):
    """`nn.LayerNorm` over the last dimension with exact mean and variance. Ba et al., 2016."""

    def __init__(self, source: nn.LayerNorm, name: str) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.name = source.weight, source.bias, source.eps, name

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            rows = x.reshape(-1, x.shape[-1])
            return _layer_norm(rows, self.weight, self.bias, self.eps, self.name)[0].view(x.shape)
        return _LayerNorm.apply(x, self.weight, self.bias, self.eps, self.name, self.accumulator)
