"""The inner loop of exact products: groups of few terms in float64, their sums in two float64s.

A product of grid integers has up to 49 bits, so 16 of them add up exactly in one float64. Far more do where most of
them are small, which is usual: sum |a b| <= sqrt(sum a^2) sqrt(sum b^2), and up to 2^53 no sum loses a bit. Such a sum
c is then added to `high`, a multiple of 2^20 above HIGH_START, and what that loses to `low`. Both are exact, so neither
the order of the terms nor how they are grouped changes the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from llvmlite.ir import Value
from numba import types
from numba.core import cgutils
from numba.core import config as numba_config
from numba.extending import intrinsic

from ppo_repro.numerics.arithmetic.grid import EXACT_TERMS
from ppo_repro.numerics.kernels.core.compile import inline

ROWS, COLUMNS = 8, 24  # of a block of the result; operands are packed for it
BLOCK = ROWS * COLUMNS
SQUARED = 64  # terms whose squares are added to bound a sum
# (sum |a b|)^2 up to which sums are exact, less a margin for the rounding of the sums of squares
_EXACT_SQUARE = 2.0**106 * 0.99
_MOST_GROUPED = 1 << 20
FLOAT, DOUBLE, I32, I64 = ir.FloatType(), ir.DoubleType(), ir.IntType(32), ir.IntType(64)


def _has_wide_registers() -> bool:
    """Whether kernels are compiled for registers of 512 bits, of which there are 32; otherwise there are 16."""
    if numba_config.CPU_NAME or numba_config.CPU_FEATURES is not None:
        return "+avx512f" in (numba_config.CPU_FEATURES or "")
    return bool(llvm.get_host_cpu_features().get("avx512f", False))


WIDE = _has_wide_registers()
# what the registers hold: sums of `TILE_ROWS` rows and three vectors of `LANES` columns
TILE_ROWS, LANES = (8, 8) if WIDE else (4, 4)
VECTORS = 3
TILE_COLUMNS = VECTORS * LANES


def _vector(element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, LANES)


def _number(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def _spread(b: Builder, scalar: Value) -> Value:
    """The same number in all lanes."""
    undefined = ir.Constant(_vector(DOUBLE), ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(_vector(I32), [0] * LANES))


def _pointer(b: Builder, kind: ir.Type, address: Value, offset: int = 0) -> Value:
    return b.inttoptr(b.add(address, _number(offset)), kind.as_pointer())


def _add_term(b: Builder, rows: int, vectors: int, left: Value, right: Value, sums: list[Value]) -> None:
    """sums[i, v] += left[i] right[v] for one term; left float64, right int32."""
    columns = []
    for v in range(vectors):
        integers = b.load(_pointer(b, _vector(I32), right, 4 * LANES * v), align=4)
        columns.append(b.sitofp(integers, _vector(DOUBLE)))
    for i in range(rows):
        x = _spread(b, b.load(_pointer(b, DOUBLE, left, 8 * i), align=8))
        for v, column in enumerate(columns):
            total = sums[i * vectors + v]
            product = b.fmul(x, column, flags=("contract",))
            b.store(b.fadd(b.load(total), product, flags=("contract",)), total)


def _empty(b: Builder, rows: int, vectors: int, sums: list[Value], high: Value, low: Value) -> None:
    """Move the sums to `high` and `low`, without a rounding error."""
    for i in range(rows):
        for v in range(vectors):
            offset, c = 8 * (i * COLUMNS + v * LANES), b.load(sums[i * vectors + v])
            h, w = (_pointer(b, _vector(DOUBLE), at, offset) for at in (high, low))
            before = b.load(h, align=8)
            after = b.fadd(before, c)
            lost = b.fsub(c, b.fsub(after, before))
            b.store(after, h, align=8)
            b.store(b.fadd(b.load(w, align=8), lost), w, align=8)


def _add_terms(
    b: Builder, rows: int, vectors: int, left: Value, right: Value, first: Value, count: Value
) -> list[Value]:
    """Places of the sums of `count` terms from `first` on, `vectors` for each row."""
    sums = [cgutils.alloca_once(b, _vector(DOUBLE)) for _ in range(rows * vectors)]
    for total in sums:
        b.store(ir.Constant(_vector(DOUBLE), None), total)
    with cgutils.for_range(b, count) as term:
        k = b.add(first, term.index)
        at_left = b.add(left, b.mul(k, _number(8 * ROWS)))
        _add_term(b, rows, vectors, at_left, b.add(right, b.mul(k, _number(4 * COLUMNS))), sums)
    return sums


def _tile(rows: int, vectors: int = VECTORS) -> Callable[..., None]:
    """An intrinsic (left, right, high, low, terms, group): high + low += left right.

    It has `rows` rows and `vectors` x LANES columns. All but the last two are addresses; the sum of any `group`
    products, counted from the first, is exact. left float64 [terms, ROWS], right int32 [terms, COLUMNS], high and low
    float64 [ROWS, COLUMNS].
    """

    def generate(context: Any, b: Builder, _: Any, args: Any) -> Value:
        left, right, high, low, terms, group_size = args
        groups = b.udiv(b.add(terms, b.sub(group_size, _number(1))), group_size)
        with cgutils.for_range(b, groups) as group:
            first = b.mul(group.index, group_size)
            rest = b.sub(terms, first)
            count = b.select(b.icmp_signed("<", rest, group_size), rest, group_size)
            _empty(b, rows, vectors, _add_terms(b, rows, vectors, left, right, first, count), high, low)
        return context.get_dummy_value()

    @intrinsic
    def tile(_, left, right, high, low, terms, group):  # type: ignore[no-untyped-def]
        return types.void(*[types.intp] * 6), generate

    return tile


def _rounded_tile(vectors: int) -> Callable[..., None]:
    """An intrinsic (left, right, terms, scales, column_scales, bias, target, stride): products whose sums are exact.

    It has TILE_ROWS rows and `vectors` x LANES columns, and `stride` bytes between rows of the target:
    target[i, c] = (fl32(sum_k left[k, i] right[k, c] scales[i] column_scales[c]) + 0) + bias[c]. All but `terms` and
    `stride` are addresses; scales and column_scales float64, the rest float32.
    """

    def generate(context: Any, b: Builder, _: Any, args: Any) -> Value:
        left, right, terms, scales, column_scales, bias, target, stride = args
        sums = _add_terms(b, TILE_ROWS, vectors, left, right, _number(0), terms)
        zeros = ir.Constant(_vector(FLOAT), [0.0] * LANES)
        factors = [b.load(_pointer(b, _vector(DOUBLE), column_scales, 8 * LANES * v), align=8) for v in range(vectors)]
        biases = [b.load(_pointer(b, _vector(FLOAT), bias, 4 * LANES * v), align=4) for v in range(vectors)]
        for i in range(TILE_ROWS):
            scale = _spread(b, b.load(_pointer(b, DOUBLE, scales, 8 * i), align=8))
            for v in range(vectors):
                total = b.fmul(b.fmul(b.load(sums[i * vectors + v]), scale), factors[v])
                y = b.fadd(b.fadd(b.fptrunc(total, _vector(FLOAT)), zeros), biases[v])
                b.store(y, _pointer(b, _vector(FLOAT), target, 4 * LANES * v), align=4)
            target = b.add(target, stride)
        return context.get_dummy_value()

    @intrinsic
    def tile(_, left, right, terms, scales, column_scales, bias, target, stride):  # type: ignore[no-untyped-def]
        return types.void(*[types.intp] * 8), generate

    return tile


def _integer_tile(vectors: int) -> Callable[..., None]:
    """An intrinsic (left, right, terms, target, stride): target = left right, int64, of products whose sums are exact.

    It has TILE_ROWS rows and `vectors` x LANES columns. All but `terms` and `stride`, the bytes between rows of the
    target, are addresses.
    """

    def generate(context: Any, b: Builder, _: Any, args: Any) -> Value:
        left, right, terms, target, stride = args
        sums = _add_terms(b, TILE_ROWS, vectors, left, right, _number(0), terms)
        for i in range(TILE_ROWS):
            for v in range(vectors):
                integers = b.fptosi(b.load(sums[i * vectors + v]), _vector(I64))
                b.store(integers, _pointer(b, _vector(I64), target, 8 * LANES * v), align=8)
            target = b.add(target, stride)
        return context.get_dummy_value()

    @intrinsic
    def tile(_, left, right, terms, target, stride):  # type: ignore[no-untyped-def]
        return types.void(*[types.intp] * 5), generate

    return tile


# The last panel of a matrix is seldom full, and in small matrices it is a sixth of all: 128 columns are 5.3 panels.
_tile_of_1, _tile_of_2, _tile_of_4, _tile_of_8 = (_tile(rows) for rows in (1, 2, 4, 8))
_tile_of_1_vector, _tile_of_2_vectors = (_tile(TILE_ROWS, vectors) for vectors in (1, 2))
_rounded_tile_of_1, _rounded_tile_of_2, _rounded_tile_of_3 = (_rounded_tile(vectors) for vectors in (1, 2, VECTORS))
_integer_tile_of_1, _integer_tile_of_2, _integer_tile_of_3 = (_integer_tile(vectors) for vectors in (1, 2, VECTORS))


@inline
def exact_terms(left, right):  # type: ignore[no-untyped-def]
    """How many terms add up exactly, given the `squares` of a block and of a panel; see `operands`."""
    bound = left * right
    if bound > _EXACT_SQUARE:
        return EXACT_TERMS
    return SQUARED * np.int64(min(np.sqrt(_EXACT_SQUARE / max(bound, 1.0)), _MOST_GROUPED))


@inline
def multiply(left, right, high, low, terms, rows, width, group):  # type: ignore[no-untyped-def]
    """high + low += left right for the first `rows` rows and `width` columns of a block; see `_tile`."""
    for column in range(0, width, TILE_COLUMNS):
        b, wanted = right + 4 * column, width - column
        for row in range(0, rows, TILE_ROWS):
            at, count = 8 * (row * COLUMNS + column), min(rows - row, TILE_ROWS)
            a, h, w = left + 8 * row, high + at, low + at
            if count == TILE_ROWS and wanted <= LANES:
                _tile_of_1_vector(a, b, h, w, terms, group)
            elif count == TILE_ROWS and wanted <= 2 * LANES:
                _tile_of_2_vectors(a, b, h, w, terms, group)
            elif count > 4:
                _tile_of_8(a, b, h, w, terms, group)
            elif count > 2:
                _tile_of_4(a, b, h, w, terms, group)
            elif count > 1:
                _tile_of_2(a, b, h, w, terms, group)
            else:
                _tile_of_1(a, b, h, w, terms, group)


@inline
def multiply_and_round(left, right, terms, width, scales, column_scales, bias, target, stride):  # type: ignore[no-untyped-def]
    """All rows of a block of the result, where all terms add up exactly, `width` columns and what pads their vector."""
    for column in range(0, width, TILE_COLUMNS):
        factors, offsets, wanted = column_scales + 8 * column, bias + 4 * column, width - column
        for row in range(0, ROWS, TILE_ROWS):
            a, b, out, scale = left + 8 * row, right + 4 * column, target + row * stride + 4 * column, scales + 8 * row
            if wanted <= LANES:
                _rounded_tile_of_1(a, b, terms, scale, factors, offsets, out, stride)
            elif wanted <= 2 * LANES:
                _rounded_tile_of_2(a, b, terms, scale, factors, offsets, out, stride)
            else:
                _rounded_tile_of_3(a, b, terms, scale, factors, offsets, out, stride)


@inline
def multiply_exactly(left, right, terms, width, target, stride):  # type: ignore[no-untyped-def]
    """All rows of a block of integer sums, as `multiply_and_round`."""
    for column in range(0, width, TILE_COLUMNS):
        wanted = width - column
        for row in range(0, ROWS, TILE_ROWS):
            a, b, out = left + 8 * row, right + 4 * column, target + row * stride + 8 * column
            if wanted <= LANES:
                _integer_tile_of_1(a, b, terms, out, stride)
            elif wanted <= 2 * LANES:
                _integer_tile_of_2(a, b, terms, out, stride)
            else:
                _integer_tile_of_3(a, b, terms, out, stride)
