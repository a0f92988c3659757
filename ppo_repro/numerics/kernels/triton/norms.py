"""Norms of rows: root mean square, and layer norm, as `layers.norms` defines them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic.grid import CHUNK, DOT_BITS, MANTISSA_BITS, ceil_log2
from ppo_repro.numerics.kernels.triton.functions import (
    MIN_EXPONENT,
    NOT_FINITE,
    NOT_FINITE64,
    exponent_of_bits,
    magnitude_bits,
    pow2,
    rint64,
    round_limbs,
    to_int64,
)
from ppo_repro.numerics.kernels.triton.launch import WARPS4, blocks_of

BITS: tl.constexpr = tl.constexpr(DOT_BITS)
LOWER: tl.constexpr = tl.constexpr((1 << DOT_BITS) - 1)


@triton.jit
def dot_limbs(a, b, a_unit, b_unit):
    """Upper and lower limbs of sum_k rne(a_k a_unit) rne(b_k b_unit), int64 [R]; numbers [R, BLOCK] float64."""
    products = to_int64(a * a_unit[:, None]) * to_int64(b * b_unit[:, None])
    return tl.sum(products >> BITS, 1), tl.sum(products & LOWER, 1)


@triton.jit
def row_exponents(at, inside, columns, R: tl.constexpr, BLOCK: tl.constexpr):
    """Exponent of the largest magnitude of each row, int32 [R]; float32 rows begin `at` [R, 1]."""
    e = tl.full((R,), MIN_EXPONENT, tl.int32)
    for start in range(0, columns, BLOCK):
        k = start + tl.arange(0, BLOCK)
        value = tl.load(at + k[None, :], mask=inside & (k < columns)[None, :], other=0.0)
        e = tl.maximum(e, exponent_of_bits(tl.max(magnitude_bits(value), 1)))
    return e


@triton.jit
def mean_square(at, centre, e, inside, columns, size, R: tl.constexpr, BLOCK: tl.constexpr):
    """mean((x - centre)^2) of each row, float64 [R]; `e` [R] are exponents above |x - centre|, centre is [R, 1]."""
    up = pow2(-e + BITS)
    above, below = tl.zeros((R,), dtype=tl.int64), tl.zeros((R,), dtype=tl.int64)
    for start in range(0, columns, BLOCK):
        k = start + tl.arange(0, BLOCK)
        live = inside & (k < columns)[None, :]
        value = tl.load(at + k[None, :], mask=live, other=0.0).to(tl.float64)
        centred = tl.where(live, value - centre, 0.0)
        upper, lower = dot_limbs(centred, centred, up, up)
        above += upper
        below += lower
    scale = pow2(e - BITS)
    return (round_limbs(above, below, BITS) * (scale * scale)) / tl.load(size)


@triton.jit
def inverse_root(mean, eps, R: tl.constexpr):
    """1 / sqrt(mean + eps), float64 [R]."""
    return tl.full((R,), 1.0, tl.float64) / tl.sqrt(mean + tl.load(eps))


@triton.jit
def rms_norm(
    x, factor, y, inverse, exponents, rows, columns, eps, size,
    R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = x inverse factor, inverse = 1 / sqrt(mean(x^2) + eps); exponents of the rows tell which are finite."""
    index = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    at = x + index[:, None] * columns
    inside = (index < rows)[:, None]
    e = row_exponents(at, inside, columns, R, BLOCK)
    tl.store(exponents + index, e, mask=index < rows)
    e = tl.where(e >= NOT_FINITE, 0, e)
    centre = tl.zeros((R, 1), dtype=tl.float64)
    own = inverse_root(mean_square(at, centre, e, inside, columns, size, R, BLOCK), eps, R)
    tl.store(inverse + index, own, mask=index < rows)
    for start in range(0, columns, BLOCK):
        k = start + tl.arange(0, BLOCK)
        live = inside & (k < columns)[None, :]
        value = tl.load(at + k[None, :], mask=live, other=0.0).to(tl.float64)
        f = tl.load(factor + k, mask=k < columns, other=0.0).to(tl.float64)
        out = ((value * own[:, None]) * f[None, :]).to(tl.float32)
        tl.store(y + index[:, None] * columns + k[None, :], out, mask=live)


@triton.jit
def layer_norm(
    x, weight, bias, y, means, inverse, exponents, rows, columns, eps, size, mean_bits,
    R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = (x - mean) inverse weight + bias, inverse = 1 / sqrt(var + eps)."""
    index = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    at = x + index[:, None] * columns
    inside = (index < rows)[:, None]
    e = row_exponents(at, inside, columns, R, BLOCK)
    tl.store(exponents + index, e, mask=index < rows)
    e = tl.where(e >= NOT_FINITE, 0, e)
    up = pow2(mean_bits - e)[:, None]
    total = tl.zeros((R,), dtype=tl.int64)
    for start in range(0, columns, BLOCK):
        k = start + tl.arange(0, BLOCK)
        value = tl.load(at + k[None, :], mask=inside & (k < columns)[None, :], other=0.0).to(tl.float64)
        total += tl.sum(rint64(value * up).to(tl.int64), 1)
    mean = (total.to(tl.float64) * pow2(e - mean_bits)) / tl.load(size)
    tl.store(means + index, mean, mask=index < rows)
    e = tl.full((R,), MIN_EXPONENT, tl.int32)
    for start in range(0, columns, BLOCK):
        k = start + tl.arange(0, BLOCK)
        live = inside & (k < columns)[None, :]
        value = tl.load(at + k[None, :], mask=live, other=0.0).to(tl.float64)
        centred = tl.where(live, value - mean[:, None], 0.0)
        e = tl.maximum(e, exponent_of_bits(tl.max(magnitude_bits(centred), 1)))
    e = tl.where(e >= NOT_FINITE64, 0, e)
    own = inverse_root(mean_square(at, mean[:, None], e, inside, columns, size, R, BLOCK), eps, R)
    tl.store(inverse + index, own, mask=index < rows)
    for start in range(0, columns, BLOCK):
        k = start + tl.arange(0, BLOCK)
        live = inside & (k < columns)[None, :]
        value = tl.load(at + k[None, :], mask=live, other=0.0).to(tl.float64)
        w = tl.load(weight + k, mask=k < columns, other=0.0).to(tl.float64)
        b = tl.load(bias + k, mask=k < columns, other=0.0).to(tl.float64)
        out = (((value - mean[:, None]) * own[:, None]) * w[None, :] + b[None, :]).to(tl.float32)
        tl.store(y + index[:, None] * columns + k[None, :], out, mask=live)


@triton.jit
def normed_and_weighted(grad, x, factor, row, k, columns, inside, mean, own, CENTRED: tl.constexpr):
    """n = (x - mean) inverse and f dy of some columns, float64 [R, BLOCK], 0 beyond the last; and which are inside."""
    live = inside & (k < columns)[None, :]
    f = tl.load(factor + k, mask=k < columns, other=0.0).to(tl.float64)[None, :]
    value = tl.load(x + row + k[None, :], mask=live, other=0.0).to(tl.float64)
    if CENTRED:
        value = tl.where(live, value - mean, 0.0)
    return value * own, tl.load(grad + row + k[None, :], mask=live, other=0.0).to(tl.float64) * f, live


@triton.jit
def norm_backward(
    grad, x, factor, means, inverse, dx, exponents, rows, columns, size, mean_bits,
    CENTRED: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = (f dy [- mean(f dy)] - n mean(f dy n)) inverse with n = (x [- mean]) inverse; CENTRED: with both means."""
    index = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    inside, row = (index < rows)[:, None], index[:, None] * columns
    own = tl.load(inverse + index, mask=index < rows, other=0.0)[:, None]
    centre = own
    if CENTRED:
        centre = tl.load(means + index, mask=index < rows, other=0.0)[:, None]
    e_weighted, e_normed = tl.full((R,), MIN_EXPONENT, tl.int32), tl.full((R,), MIN_EXPONENT, tl.int32)
    for start in range(0, columns, BLOCK):
        k = start + tl.arange(0, BLOCK)
        normed, weighted, _ = normed_and_weighted(grad, x, factor, row, k, columns, inside, centre, own, CENTRED)
        e_normed = tl.maximum(e_normed, exponent_of_bits(tl.max(magnitude_bits(normed), 1)))
        e_weighted = tl.maximum(e_weighted, exponent_of_bits(tl.max(magnitude_bits(weighted), 1)))
    tl.store(exponents + index, tl.maximum(e_weighted, e_normed), mask=index < rows)
    e_weighted = tl.where(e_weighted >= NOT_FINITE64, 0, e_weighted)
    e_normed = tl.where(e_normed >= NOT_FINITE64, 0, e_normed)
    above, below, total = tl.zeros((R,), dtype=tl.int64), tl.zeros((R,), dtype=tl.int64), tl.zeros((R,), dtype=tl.int64)
    for start in range(0, columns, BLOCK):
        k = start + tl.arange(0, BLOCK)
        normed, weighted, _ = normed_and_weighted(grad, x, factor, row, k, columns, inside, centre, own, CENTRED)
        upper, lower = dot_limbs(weighted, normed, pow2(-e_weighted + BITS), pow2(-e_normed + BITS))
        above += upper
        below += lower
        if CENTRED:
            total += tl.sum(rint64(weighted * pow2(mean_bits - e_weighted)[:, None]).to(tl.int64), 1)
    unit = pow2(e_weighted - BITS) * pow2(e_normed - BITS)
    dot = ((round_limbs(above, below, BITS) * unit) / tl.load(size))[:, None]
    mean = ((total.to(tl.float64) * pow2(e_weighted - mean_bits)) / tl.load(size))[:, None]
    for start in range(0, columns, BLOCK):
        k = start + tl.arange(0, BLOCK)
        normed, weighted, live = normed_and_weighted(grad, x, factor, row, k, columns, inside, centre, own, CENTRED)
        if CENTRED:
            weighted = weighted - mean
        tl.store(dx + row + k[None, :], ((weighted - normed * dot) * own).to(tl.float32), mask=live)


def _number(value: float, x: Tensor) -> Tensor:
    """A float64 argument of a kernel: Triton would hand over a number of Python as float32."""
    return torch.full((1,), value, dtype=torch.float64, device=x.device)


def _outputs(x: Tensor, count: int) -> list[Tensor]:
    return [torch.empty(len(x), dtype=torch.float64, device=x.device) for _ in range(count)]


def _refuse(exponents: Tensor, limit: int, where: str) -> None:
    if len(exponents) and int(exponents.amax()) >= limit:
        raise NumericsError(f"{where} is not finite; lower the learning rate or check the weights")


def _require_length(columns: int) -> None:
    if columns > CHUNK:
        raise NumericsError(f"a dot product of {columns} terms; at most {CHUNK} are exact")


def rms_normed(x: Tensor, factor: Tensor, eps: float, where: str) -> tuple[Tensor, Tensor]:
    """The norm of each row of x [n, H] float32 and 1 / sqrt(mean(x^2) + eps), float64 [n, 1].

    The factor [H] is float32 or float64. Raises NumericsError naming `where` if x is not finite.
    """
    (rows, columns), x = x.shape, x.contiguous()
    _require_length(columns)
    y, (inverse,) = torch.empty_like(x), _outputs(x, 1)
    exponents = torch.empty(rows, dtype=torch.int32, device=x.device)
    block, together = blocks_of(columns)
    numbers = _number(eps, x), _number(columns, x)
    rms_norm[(-(-rows // together),)](
        x, factor, y, inverse, exponents, rows, columns, *numbers, R=together, BLOCK=block, **WARPS4
    )
    _refuse(exponents, int(NOT_FINITE.value), where)
    return y, inverse[:, None]


def norm_gradient(grad: Tensor, x: Tensor, factor: Tensor, means: Tensor | None, inverse: Tensor, where: str) -> Tensor:
    """dx of `rms_normed` (means None) or of `layer_normed`; grad, x [n, H] float32, means and inverse [n, 1].

    Raises NumericsError naming `where` if it is not finite.
    """
    (rows, columns), x, grad, inverse = x.shape, x.contiguous(), grad.contiguous(), inverse.contiguous()
    dx, exponents = torch.empty_like(x), torch.empty(rows, dtype=torch.int32, device=x.device)
    block, together = blocks_of(columns)
    norm_backward[(-(-rows // together),)](
        grad, x, factor, inverse if means is None else means.contiguous(), inverse, dx, exponents,
        rows, columns, _number(columns, x), MANTISSA_BITS - ceil_log2(columns),
        CENTRED=means is not None, R=together, BLOCK=block, **WARPS4,
    )  # fmt: skip
    _refuse(exponents, int(NOT_FINITE64.value), where)
    return dx


def layer_normed(x: Tensor, weight: Tensor, bias: Tensor, eps: float, where: str) -> tuple[Tensor, Tensor, Tensor]:
    """The layer norm of each row of x [n, H] float32, the rows' means and 1 / sqrt(var + eps), float64 [n, 1].

    Raises NumericsError naming `where` if x is not finite.
    """
    (rows, columns), x = x.shape, x.contiguous()
    _require_length(columns)
    y, (means, inverse) = torch.empty_like(x), _outputs(x, 2)
    exponents = torch.empty(rows, dtype=torch.int32, device=x.device)
    block, together = blocks_of(columns)
    bits = MANTISSA_BITS - ceil_log2(columns)
    layer_norm[(-(-rows // together),)](
        x, weight, bias, y, means, inverse, exponents, rows, columns, _number(eps, x), _number(columns, x), bits,
        R=together, BLOCK=block, **WARPS4,
    )  # fmt: skip
    _refuse(exponents, int(NOT_FINITE.value), where)
    return y, means[:, None], inverse[:, None]
