"""Operands of products: rows on their grids, as signed 8-bit digits or as integers, and their outliers.

`arithmetic.contraction` defines grid and outliers. The grid of a row with outliers ends at its (m + 1)th largest
exponent, m the most outliers it may have; it is found by counting, eight times, how many reach an exponent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic.contraction import most_outliers
from ppo_repro.numerics.arithmetic.grid import INPUT_BITS, INPUT_GAP, ROOM, WEIGHT_BITS, WEIGHT_GAP
from ppo_repro.numerics.kernels.triton.functions import (
    MIN_EXPONENT,
    NOT_FINITE,
    exponent_of_bits,
    magnitude_bits,
    pow2,
    to_int64,
)
from ppo_repro.numerics.kernels.triton.launch import WARPS4, blocks_of

INPUT_DIGITS, WEIGHT_DIGITS = 4, 3  # signed digits of 8 bits: 26 bits and a sign; 23 bits and a sign below 127 65793
PAD = 64  # the length of a row of digits is a multiple of this, so that products need no masks along it
MAX_TERMS = 1 << 14  # of digits: three products of 2^14 each stay below 2^31, the sum of all levels below 2^63


@dataclass(frozen=True)
class Rows:
    """R rows of K numbers on their grids."""

    values: Tensor  # float32 [R, K], any strides
    digits: Tensor | None  # int8 [D, R, K padded]; None where K > MAX_TERMS
    integers: Tensor | None  # int32 [R, K padded], where there are no digits
    exponents: Tensor  # int32 [R], of the grid
    bits: int
    outliers: Tensor  # int32 [R, most], columns by rising number
    counts: Tensor  # int32 [R], how many of them there are
    most: int  # max(counts)


@triton.jit
def reached(x, at, inside, column_stride, k, columns, room):
    """Numbers of some rows [R, BLOCK], 0 outside, and the exponents of their magnitudes times `room`."""
    inside = inside[:, None] & (k < columns)[None, :]
    value = tl.load(x + at[:, None] + k.to(tl.int64)[None, :] * column_stride, mask=inside, other=0.0)
    return value, exponent_of_bits(magnitude_bits(value * room)), inside


@triton.jit
def count_reaching(x, at, inside, column_stride, columns, room, least, R: tl.constexpr, BLOCK: tl.constexpr):
    """How many numbers of each row have an exponent of at least `least`; int32 [R]."""
    total = tl.zeros((R,), dtype=tl.int32)
    for start in range(0, columns, BLOCK):
        k = start + tl.arange(0, BLOCK)
        _, e, live = reached(x, at, inside, column_stride, k, columns, room)
        total += tl.sum(((e >= least[:, None]) & live).to(tl.int32), 1)
    return total


@triton.jit
def grid_exponents(x, at, inside, column_stride, columns, room, gap, most, R: tl.constexpr, BLOCK: tl.constexpr):
    """The exponent of the grid of each row, int32 [R]; NOT_FINITE where a number is not."""
    highest = tl.full((R,), MIN_EXPONENT, tl.int32)
    for start in range(0, columns, BLOCK):
        k = start + tl.arange(0, BLOCK)
        _, e, _ = reached(x, at, inside, column_stride, k, columns, room)
        highest = tl.maximum(highest, tl.max(e, 1))
    few = count_reaching(x, at, inside, column_stride, columns, room, highest - gap + 1, R, BLOCK) <= most
    has_outliers = few & inside & (highest < NOT_FINITE)
    if tl.max(has_outliers.to(tl.int32), 0) > 0:
        low = tl.full((R,), MIN_EXPONENT, tl.int32)
        high = tl.maximum(highest - gap, low)
        for _ in range(8):
            middle = (low + high + 1) >> 1
            enough = count_reaching(x, at, inside, column_stride, columns, room, middle, R, BLOCK) > most
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        highest = tl.where(has_outliers, low, highest)
    return highest


@triton.jit
def put_on_grid(
    x, row_stride, column_stride, columns, padded, rows, room, gap, most,
    digits, integers, exponents, outliers, counts,
    BITS: tl.constexpr, DIGITS: tl.constexpr, AS_DIGITS: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """R rows: their exponents, their digits or integers, and the columns of their outliers."""
    index = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    inside = index < rows
    at = index * row_stride
    e = grid_exponents(x, at, inside, column_stride, columns, room, gap, most, R, BLOCK)
    tl.store(exponents + index, e, mask=inside)
    unit = pow2(BITS - e)[:, None]
    found = tl.zeros((R,), dtype=tl.int32)
    for start in range(0, padded, BLOCK):
        k = start + tl.arange(0, BLOCK)
        value, own, _ = reached(x, at, inside, column_stride, k, columns, room)
        beyond = own > e[:, None]
        place = found[:, None] + tl.cumsum(beyond.to(tl.int32), 1) - 1
        columns_at = outliers + index[:, None] * most + place
        tl.store(columns_at, tl.broadcast_to(k[None, :], (R, BLOCK)), mask=beyond & (place < most))
        found += tl.sum(beyond.to(tl.int32), 1)
        whole = to_int64(tl.where(beyond, 0.0, value).to(tl.float64) * unit).to(tl.int32)
        live = inside[:, None] & (k < padded)[None, :]
        if AS_DIGITS:
            for d in tl.static_range(DIGITS):
                digit = ((whole + 128) & 255) - 128
                whole = (whole - digit) >> 8
                tl.store(digits + (d * rows + index[:, None]) * padded + k[None, :], digit.to(tl.int8), mask=live)
        else:
            tl.store(integers + index[:, None] * padded + k[None, :], whole, mask=live)
    tl.store(counts + index, found, mask=inside)


def _rows(x: Tensor, bits: int, digit_count: int, gap: int, room: float, where: str) -> Rows:
    rows, columns = x.shape
    padded, most = -(-columns // PAD) * PAD, most_outliers(columns)
    as_digits = columns <= MAX_TERMS
    digits = torch.empty((digit_count, rows, padded) if as_digits else (0,), dtype=torch.int8, device=x.device)
    integers = torch.empty((0,) if as_digits else (rows, padded), dtype=torch.int32, device=x.device)
    exponents, counts = (torch.empty(rows, dtype=torch.int32, device=x.device) for _ in range(2))
    outliers = torch.empty(rows, max(1, most), dtype=torch.int32, device=x.device)
    block, together = blocks_of(padded)
    put_on_grid[(-(-rows // together),)](
        x, *x.stride(), columns, padded, rows, room, gap, most, digits, integers, exponents, outliers, counts,
        BITS=bits, DIGITS=digit_count, AS_DIGITS=as_digits, R=together, BLOCK=block, **WARPS4,
    )  # fmt: skip
    highest, found = (int(v) for v in torch.stack([exponents.amax(), counts.amax()]).tolist())
    if highest >= NOT_FINITE:
        raise NumericsError(f"{where} is not finite; lower the learning rate or check the weights")
    kept, whole = (digits, None) if as_digits else (None, integers)
    return Rows(x, kept, whole, exponents, bits, outliers, counts, found)


def input_rows(x: Tensor, where: str) -> Rows:
    """Inputs x [M, K] float32 on grids of 26 bits; NumericsError naming `where` if one is not finite."""
    return _rows(x, INPUT_BITS, INPUT_DIGITS, INPUT_GAP, 1.0, where)


def weight_rows(w: Tensor, where: str) -> Rows:
    """Weights w [N, K] float32, also a transposed view, on grids of 23 bits; NumericsError if one is not finite."""
    return _rows(w, WEIGHT_BITS, WEIGHT_DIGITS, WEIGHT_GAP, ROOM, where)
