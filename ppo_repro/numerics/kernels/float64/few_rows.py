"""Products of a few rows with packed weights: weights are read once, and sums are rounded in the registers they are in.

Unlike `tiles`, a sum keeps what `high` cannot take as the start of the next group of terms. There is room for it:
weights are packed below 2^23 / ROOM, so 16 products and a rest of 2^19 stay below 2^53.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from llvmlite.ir import Value
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ppo_repro.numerics.arithmetic.grid import EXACT_TERMS, HIGH_START, INPUT_BITS, INPUT_GAP
from ppo_repro.numerics.kernels.core.compile import inline, kernel_part
from ppo_repro.numerics.kernels.core.rows import grid_exponent, largest_bits
from ppo_repro.numerics.kernels.core.scalar import INFINITY_BITS, pow2_32, pow2_64
from ppo_repro.numerics.kernels.core.vectors import FLOAT
from ppo_repro.numerics.kernels.float64.tiles import (
    BLOCK,
    COLUMNS,
    DOUBLE,
    I32,
    LANES,
    ROWS,
    TILE_COLUMNS,
    TILE_ROWS,
    VECTORS,
)
from ppo_repro.numerics.kernels.float64.tiles import _number as number
from ppo_repro.numerics.kernels.float64.tiles import _pointer as pointer
from ppo_repro.numerics.kernels.float64.tiles import _spread as spread
from ppo_repro.numerics.kernels.float64.tiles import _vector as vector

PADDING = 8  # numbers between rows of inputs, so that eight rows of 512 do not share their sets of the cache
_ONE = np.float32(1.0)


def _add_terms(b: Builder, rows: int, left: Value, left_row: Value, right: Value, count: Value, sums: Any) -> None:
    """sums[i, v] += left[i, k] right[k, v] over `count` terms."""
    starts, vectors = [left], len(sums) // rows
    for _ in range(rows - 1):
        starts.append(b.add(starts[-1], left_row))
    with cgutils.for_range(b, count) as term:
        at = b.add(right, b.mul(term.index, number(4 * COLUMNS)))
        columns = []
        for v in range(vectors):
            integers = b.load(pointer(b, vector(I32), at, 4 * LANES * v), align=4)
            columns.append(b.sitofp(integers, vector(DOUBLE)))
        for i in range(rows):
            x = spread(b, b.load(pointer(b, DOUBLE, b.add(starts[i], b.mul(term.index, number(8)))), align=8))
            for v, column in enumerate(columns):
                total = sums[i * vectors + v]
                product = b.fmul(x, column, flags=("contract",))
                b.store(b.fadd(b.load(total), product, flags=("contract",)), total)


def _carry(b: Builder, sums: list[Value], scratch: Value) -> None:
    """Move what `high`, in scratch memory, can hold from the sums to it, exactly."""
    for index, total in enumerate(sums):
        at = pointer(b, vector(DOUBLE), scratch, 8 * LANES * index)
        before, rest = b.load(at, align=8), b.load(total)
        after = b.fadd(before, rest)
        b.store(b.fsub(rest, b.fsub(after, before)), total)
        b.store(after, at, align=8)


def _tile(rows: int, vectors: int = VECTORS) -> Callable[..., None]:
    """An intrinsic: y = fl32(sum_k left right scale column_scale) + 0 + bias of `rows` rows, `vectors` x LANES columns.

    (left, left_row, right, terms, scratch, scales, column_scales, bias, y, y_row), all but `terms` addresses or bytes
    from row to row. left float64, right int32 [terms, COLUMNS], y float32.
    """

    def generate(context: Any, b: Builder, _: Any, args: Any) -> Value:
        left, left_row, right, terms, scratch, scales, column_scales, bias, y, y_row = args
        start = ir.Constant(vector(DOUBLE), [HIGH_START] * LANES)
        sums = [cgutils.alloca_once_value(b, ir.Constant(vector(DOUBLE), None)) for _ in range(rows * vectors)]
        for index in range(len(sums)):
            b.store(start, pointer(b, vector(DOUBLE), scratch, 8 * LANES * index), align=8)
        groups = b.udiv(b.add(terms, number(EXACT_TERMS - 1)), number(EXACT_TERMS))
        with cgutils.for_range(b, groups) as group:
            first = b.mul(group.index, number(EXACT_TERMS))
            rest = b.sub(terms, first)
            count = b.select(b.icmp_signed("<", rest, number(EXACT_TERMS)), rest, number(EXACT_TERMS))
            at_left, at_right = b.add(left, b.mul(first, number(8))), b.add(right, b.mul(first, number(4 * COLUMNS)))
            _add_terms(b, rows, at_left, left_row, at_right, count, sums)
            _carry(b, sums, scratch)
        zero = ir.Constant(ir.VectorType(FLOAT, LANES), [0.0] * LANES)
        for i in range(rows):
            scale = spread(b, b.load(pointer(b, DOUBLE, scales, 8 * i), align=8))
            target = b.add(y, b.mul(number(i), y_row))
            for v in range(vectors):
                index = i * vectors + v
                high = b.load(pointer(b, vector(DOUBLE), scratch, 8 * LANES * index), align=8)
                total = b.fmul(b.fadd(b.fsub(high, start), b.load(sums[index])), scale)
                column_scale = b.load(pointer(b, vector(DOUBLE), column_scales, 8 * LANES * v), align=8)
                rounded = b.fptrunc(b.fmul(total, column_scale), ir.VectorType(FLOAT, LANES))
                added = b.load(pointer(b, vector(FLOAT), bias, 4 * LANES * v), align=4)
                result = b.fadd(b.fadd(rounded, zero), added)
                b.store(result, pointer(b, vector(FLOAT), target, 4 * LANES * v), align=4)
        return context.get_dummy_value()

    @intrinsic
    def tile(_, left, left_row, right, terms, scratch, scales, column_scales, bias, y, y_row):  # type: ignore[no-untyped-def]
        return types.void(*[types.intp] * 10), generate

    return tile


_tile_of_1, _tile_of_2, _tile_of_4, _tile_of_8 = (_tile(rows) for rows in (1, 2, 4, 8))
_tile_of_1_vector, _tile_of_2_vectors = (_tile(TILE_ROWS, vectors) for vectors in (1, 2))


@inline
def _tile_of(count, wanted, a, a_row, b, terms, scratch, scales, column_scales, bias, y, y_row):  # type: ignore[no-untyped-def]
    if count > TILE_ROWS // 2 and wanted <= LANES:
        _tile_of_1_vector(a, a_row, b, terms, scratch, scales, column_scales, bias, y, y_row)
    elif count > TILE_ROWS // 2 and wanted <= 2 * LANES:
        _tile_of_2_vectors(a, a_row, b, terms, scratch, scales, column_scales, bias, y, y_row)
    elif count > 4:
        _tile_of_8(a, a_row, b, terms, scratch, scales, column_scales, bias, y, y_row)
    elif count > 2:
        _tile_of_4(a, a_row, b, terms, scratch, scales, column_scales, bias, y, y_row)
    elif count > 1:
        _tile_of_2(a, a_row, b, terms, scratch, scales, column_scales, bias, y, y_row)
    else:
        _tile_of_1(a, a_row, b, terms, scratch, scales, column_scales, bias, y, y_row)


@kernel_part
def multiply_rows(inputs, scales, rows, terms, panels, column_scales, bias, columns, y):  # type: ignore[no-untyped-def]
    """y = fl32(sum of x w on their grids) + 0 + bias, flat y [rows, columns] float32, without outliers.

    `inputs` and `scales` are those of `put_on_grid`; panels, column_scales and bias addresses of int32
    [N / COLUMNS, terms, COLUMNS], float64 and float32 [N] padded with zeros to whole panels.
    """
    scratch, block = np.empty(BLOCK), np.empty(BLOCK, np.float32)
    stride, x, out = 8 * (terms + PADDING), inputs.ctypes.data, y.ctypes.data
    for panel in range((columns + COLUMNS - 1) // COLUMNS):
        start = panel * COLUMNS
        width = min(COLUMNS, columns - start)
        for row in range(0, rows, ROWS):
            height = min(ROWS, rows - row)
            target, target_row = out + 4 * (row * columns + start), 4 * columns
            if width < COLUMNS or height & (height - 1) != 0:  # whole tiles would reach beyond y
                target, target_row = block.ctypes.data, 4 * COLUMNS
            for c in range(0, width, TILE_COLUMNS):
                b = panels + 4 * (panel * terms * COLUMNS + c)
                s, w = column_scales + 8 * (start + c), bias + 4 * (start + c)
                for r in range(0, height, TILE_ROWS):
                    a, d = x + (row + r) * stride, scales.ctypes.data + 8 * (row + r)
                    count, place = min(height - r, TILE_ROWS), target + r * target_row + 4 * c
                    _tile_of(
                        count, width - c, a, stride, b, terms, scratch.ctypes.data, d, s, w, place, target_row
                    )  # fmt: skip
            if target == block.ctypes.data:
                for i in range(height):
                    at = (row + i) * columns + start
                    for c in range(width):
                        y[at + c] = block[i * COLUMNS + c]


@kernel_part
def put_on_grid(x, terms, most, inputs, scales, limits):  # type: ignore[no-untyped-def]
    """Rows of flat x [R, terms] on their grids: integers into `inputs`, float64 [R, terms + PADDING], without outliers.

    `limits` float32 [R] says from which magnitude on a number is an outlier, infinity where there is none. Returns 0
    if a number is not finite, 1 without outliers, 2 with some.
    """
    result, one = 1, _ONE
    for r in range(x.size // terms):
        row, out = x[r * terms : r * terms + terms], inputs[r * (terms + PADDING) : r * (terms + PADDING) + terms]
        if largest_bits(row.view(np.int32)) >= INFINITY_BITS:
            return 0
        e, has_outliers = grid_exponent(row, one, INPUT_GAP, most)
        scales[r], up, limits[r] = pow2_64(e - INPUT_BITS), pow2_64(INPUT_BITS - e), np.inf
        if has_outliers:
            result, limit = 2, pow2_32(e)
            limits[r] = limit
            for k in range(terms):
                out[k] = np.rint(np.float64(row[k]) * up) if np.abs(row[k]) < limit else 0.0
        else:
            for k in range(terms):
                out[k] = np.rint(np.float64(row[k]) * up)
    return result


@kernel_part
def add_outliers(x, terms, limits, w, starts, others, y, columns):  # type: ignore[no-untyped-def]
    """y[m, n] = fl32(y[m, n] + sum of x[m, k] w[n, k] over the outliers of row m, then over the others of row n).

    Flat x [R, terms], w [columns, terms] float32; the outliers of row n of w are others[starts[n]:starts[n + 1]], and
    `others` is empty where w has none.
    """
    own = np.empty(terms, np.int64)
    for m in range(limits.size):
        count, row = 0, x[m * terms : m * terms + terms]
        if limits[m] < np.inf:
            for k in range(terms):
                if np.abs(row[k]) >= limits[m]:
                    own[count] = k
                    count += 1
        if count == 0 and others.size == 0:
            continue
        for n in range(columns):
            total = 0.0
            for i in range(count):
                total += np.float64(row[own[i]]) * np.float64(w[n * terms + own[i]])
            if others.size:
                for i in range(starts[n], starts[n + 1]):
                    k = others[i]
                    if np.abs(row[k]) < limits[m]:
                        total += np.float64(row[k]) * np.float64(w[n * terms + k])
            y[m * columns + n] = np.float32(np.float64(y[m * columns + n]) + total)
