"""Integer gradients: sums over tokens of products of 8-bit digits, or of rows, added to int64; their exponents; norms.

Integers that several programs add to one number are added atomically: in any order they have one sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppo_repro.numerics.kernels.core.rows import NOTHING as NO_EXPONENT
from ppo_repro.numerics.kernels.triton.functions import (
    NOT_FINITE,
    NOT_FINITE64,
    exponent_of_bits,
    magnitude_bits,
    pow2,
    to_int64,
)
from ppo_repro.numerics.kernels.triton.launch import WARPS4, WARPS8, blocks_of, rows_of_a_tile
from ppo_repro.numerics.kernels.triton.operands import INPUT_DIGITS, PAD, WEIGHT_DIGITS
from ppo_repro.numerics.kernels.triton.product import digit_sums

NOTHING: tl.constexpr = tl.constexpr(int(NO_EXPONENT))
HALF: tl.constexpr = tl.constexpr(13)  # bits of the lower half of a number that is squared
TOKENS: tl.constexpr = tl.constexpr(1 << 15)  # whose products one int32 holds: three of 2^14 for each


@triton.jit
def largest_exponents(x, exponents, rows, columns, R: tl.constexpr, BLOCK: tl.constexpr):
    """The exponent of the largest number of each row, NOTHING for a row of zeros."""
    index = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    at = x + index[:, None] * columns
    first = tl.arange(0, BLOCK)
    live = (index < rows)[:, None] & (first < columns)[None, :]
    top = tl.max(magnitude_bits(tl.load(at + first[None, :], mask=live, other=0.0)), 1)
    for start in range(BLOCK, columns, BLOCK):
        k = start + first
        live = (index < rows)[:, None] & (k < columns)[None, :]
        top = tl.maximum(top, tl.max(magnitude_bits(tl.load(at + k[None, :], mask=live, other=0.0)), 1))
    e = tl.where(top == 0, NOTHING, exponent_of_bits(top).to(tl.int64))
    tl.store(exponents + index, e, mask=index < rows)


@triton.jit
def put_columns(x, up, digits, tokens, columns, padded, DIGITS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    """The digits of rne(x[t, n] up[t]), transposed: int8 [D, N, T padded]."""
    t, n = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1) * BC + tl.arange(0, BC)
    live = (t < tokens)[:, None] & (n < columns)[None, :]
    value = tl.load(x + t.to(tl.int64)[:, None] * columns + n[None, :], mask=live, other=0.0)
    unit = tl.load(up + t, mask=t < tokens, other=0.0)
    whole = to_int64(value.to(tl.float64) * unit[:, None]).to(tl.int32)
    inside = (t < padded)[:, None] & (n < columns)[None, :]
    for d in tl.static_range(DIGITS):
        digit = ((whole + 128) & 255) - 128
        whole = (whole - digit) >> 8
        at = digits + (d * columns + n.to(tl.int64)[None, :]) * padded + t[:, None]
        tl.store(at, digit.to(tl.int8), mask=inside)


@triton.jit
def add_gradient(
    grad, x, out, n_rows, k_rows, padded, FRESH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """out[n, k] += sum_t grad[n, t] x[k, t] in int64; FRESH: = instead of +=."""
    i, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.int64)
    for start in range(0, padded, TOKENS):
        last = tl.minimum(start + TOKENS, padded)
        total += digit_sums(grad, x, n_rows, k_rows, i, j, start, last, padded, BM, BN, BK)
    at = out + i.to(tl.int64)[:, None] * k_rows + j[None, :]
    inside = (i < n_rows)[:, None] & (j < k_rows)[None, :]
    if not FRESH:
        total += tl.load(at, mask=inside, other=0)
    tl.store(at, total, mask=inside)


@triton.jit
def add_rows(
    x, exponents, ids, out, rows, columns, limit, shift, BY_ID: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr
):
    """out[n] += sum_t rne(x[t, n] 2^shift) over rows with exponents up to `limit`; BY_ID: to row ids[t] of out."""
    t, n = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1) * BC + tl.arange(0, BC)
    inside = t < rows
    fitting = inside & (tl.load(exponents + t, mask=inside, other=0) <= limit)
    live = fitting[:, None] & (n < columns)[None, :]
    value = tl.load(x + t.to(tl.int64)[:, None] * columns + n[None, :], mask=live, other=0.0)
    whole = to_int64(value.to(tl.float64) * pow2(tl.zeros((BT,), dtype=tl.int32) + shift)[:, None])
    if BY_ID:
        row = tl.load(ids + t, mask=fitting, other=0)
        tl.atomic_add(out + row[:, None] * columns + n[None, :], whole, mask=live, sem="relaxed")
    else:
        tl.atomic_add(out + n, tl.sum(whole, 0), mask=n < columns, sem="relaxed")


@triton.jit
def add_squares(x, sums, count, shift, BLOCK: tl.constexpr):
    """sums += sum_i of high^2, high low and low^2, where rne(x_i 2^shift) = high 2^13 + low."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < count, other=0.0)
    whole = to_int64(value.to(tl.float64) * pow2(tl.zeros((BLOCK,), dtype=tl.int32) + shift))
    high = whole >> HALF
    low = whole - (high << HALF)
    tl.atomic_add(sums, tl.sum(high * high, 0), sem="relaxed")
    tl.atomic_add(sums + 1, tl.sum(high * low, 0), sem="relaxed")
    tl.atomic_add(sums + 2, tl.sum(low * low, 0), sem="relaxed")


def row_exponents(x: Tensor) -> Tensor | None:
    """`products.row_exponents` of x [M, K] float32 or float64; None if a row is not finite."""
    rows, columns = x.shape
    exponents = torch.empty(rows, dtype=torch.int64, device=x.device)
    block, together = blocks_of(columns)
    largest_exponents[(-(-rows // together),)](
        x.contiguous(), exponents, rows, columns, R=together, BLOCK=block, **WARPS4
    )
    limit = NOT_FINITE if x.dtype == torch.float32 else NOT_FINITE64
    return None if rows and int(exponents.amax()) >= limit.value else exponents


def _columns(x: Tensor, up: Tensor, digit_count: int) -> Tensor:
    tokens, columns = x.shape
    padded = -(-tokens // PAD) * PAD
    digits = torch.empty(digit_count, columns, padded, dtype=torch.int8, device=x.device)
    put_columns[(padded // 32, -(-columns // 32))](
        x.contiguous(), up, digits, tokens, columns, padded, DIGITS=digit_count, BT=32, BC=32, **WARPS4
    )
    return digits


def add_products(grad: Tensor, up: Tensor, x: Tensor, x_up: Tensor, out: Tensor, fresh: bool) -> None:
    """`products.add_products`: grad [T, N], x [T, K] float32, integers up to 2^27 and 2^22, out int64 [N, K]."""
    z, integers = _columns(grad, up, INPUT_DIGITS), _columns(x, x_up, WEIGHT_DIGITS)
    (n, k), padded = out.shape, z.shape[-1]
    tile = rows_of_a_tile(out)
    add_gradient[(-(-n // tile), -(-k // 64))](
        z, integers, out, n, k, padded, FRESH=fresh, BM=tile, BN=64, BK=64, **WARPS8
    )


def add_integer_rows(x: Tensor, exponents: Tensor, limit: int, shift: int, ids: Tensor | None, out: Tensor) -> None:
    """`products.add_integer_rows`: x [T, N] float32 or float64, exponents and ids int64 [T], out int64."""
    assert out.is_contiguous()
    (rows, columns), by_id = x.shape, ids is not None
    add_rows[(-(-rows // 32), -(-columns // 64))](
        x.contiguous(), exponents, exponents if ids is None else ids.contiguous(), out, rows, columns, limit, shift,
        BY_ID=by_id, BT=32, BC=64, **WARPS4,
    )  # fmt: skip


def sum_of_squares(x: Tensor, shift: int) -> int:
    """sum rne(x 2^shift)^2 of integers up to 2^26, x float32 or float64 of any shape."""
    sums = torch.zeros(3, dtype=torch.int64, device=x.device)
    add_squares[(-(-x.numel() // 1024),)](x.contiguous(), sums, x.numel(), shift, BLOCK=1024, **WARPS4)
    high, middle, low = sums.tolist()
    return int((high << 26) + (middle << 14) + low)
