"""Many operations of a decoder layer in one call, a few rows at a time, by products in float64.

A program is a list of steps. All steps run over some rows, which stay in the cache from step to step, then over the
next rows. Every step calls the kernel of the single operation, so it gives its bits. Called one by one from Python,
the kernels of a small model take hardly longer than the calls themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np

from ppo_repro.numerics.arithmetic.grid import INPUT_BITS, INPUT_GAP, WEIGHT_BITS
from ppo_repro.numerics.kernels.core.compile import inline, kernel, kernel_part
from ppo_repro.numerics.kernels.core.memory import doubles, floats, integers, small_integers
from ppo_repro.numerics.kernels.core.pool import results_of_parts
from ppo_repro.numerics.kernels.float64 import digits
from ppo_repro.numerics.kernels.float64.digit_product import contract_digits
from ppo_repro.numerics.kernels.float64.inputs import digits_size, fill_digits, fill_inputs
from ppo_repro.numerics.kernels.float64.product import contract_panels
from ppo_repro.numerics.kernels.float64.tiles import COLUMNS, ROWS
from ppo_repro.numerics.kernels.layer_parts import (
    add_flat,
    rotate_rows,
    rotate_rows_back,
    silu_times_backward_flat,
    silu_times_flat,
)
from ppo_repro.numerics.kernels.norms import NO_GRID, NOT_FINITE, backward_rows, rms_norm_rows
from ppo_repro.numerics.kernels.outliers import Outliers, add_rows, find_rows
from ppo_repro.numerics.kernels.row_steps import (
    ADD,
    FIELDS,
    GRID,
    NORM,
    NORM_BACK,
    PRODUCT,
    ROTATE,
    SCRATCH,
    SILU,
    SILU_BACK,
    Step,
)

_CACHED = 1 << 16  # numbers of the operand of a group of rows, in float64: half of a second-level cache of 1 MiB
_MOST_ROWS = 128  # of a group
_ONE = np.float32(1.0)
_fill, _contract = (fill_digits, contract_digits) if digits.IN_USE else (fill_inputs, contract_panels)
_COLUMNS = digits.COLUMNS if digits.IN_USE else COLUMNS  # that a product takes at a time


class _Operand(NamedTuple):
    """Memory of the operand that products of a group of rows share."""

    blocks: np.ndarray
    squares: np.ndarray
    scales: np.ndarray
    has_outliers: np.ndarray
    starts: np.ndarray  # of the outliers of each row
    columns: np.ndarray
    filled: np.ndarray  # how many columns


class _Group(NamedTuple):
    """Rows first..first + rows - 1, and the memory of the results that only later steps of a group need."""

    first: int
    rows: int
    scratch: np.ndarray  # float32 [SCRATCH, width]
    width: int


@kernel_part
def _at(place, group, width):  # type: ignore[no-untyped-def]
    """The rows of a group of a float32 matrix of `width` columns, flat: at an address, or number `place` of scratch."""
    if place < SCRATCH:
        return group.scratch[place * group.width : place * group.width + group.rows * width]
    return numba.carray(floats(place + 4 * group.first * width), group.rows * width)


# These are inlined into `_run`: kernels of their own would be compiled by themselves and once more within it.


@inline
def _norm(step, eps, group):  # type: ignore[no-untyped-def]
    size, begin, rows = step[5], np.int64(0), group.rows * step[6]
    x, y = _at(step[1], group, size * step[6]), _at(step[2], group, size * step[6])
    inverse = numba.carray(doubles(step[3] + 8 * group.first * step[6]), rows)
    return rms_norm_rows(x, x.view(np.int32), numba.carray(floats(step[4]), size), eps, begin, rows, inverse, y)


@inline
def _grid(step, group, operand):  # type: ignore[no-untyped-def]
    terms, most, begin, rows = step[3], step[4], np.int64(0), group.rows
    gap, bits = np.int64(INPUT_GAP), np.int64(INPUT_BITS)
    x, exponents = _at(step[1], group, terms), numba.carray(integers(step[2] + 8 * group.first), rows)
    marks, scales, blocks = operand.has_outliers[:rows], operand.scales[:rows], (rows + ROWS - 1) // ROWS
    marks[:] = False
    finite = _fill(x, terms, gap, most, bits, begin, blocks, operand.blocks, operand.squares, scales, exponents, marks)
    operand.filled[0] = 0
    if finite and np.any(marks):
        step_of_columns = np.int64(1)
        operand.filled[0] = find_rows(
            x, terms, step_of_columns, terms, marks, _ONE, gap, most, operand.starts, operand.columns
        )
    return finite


@inline
def _add_outliers(step, x, terms, y, columns, group, operand):  # type: ignore[no-untyped-def]
    starts = numba.carray(integers(step[6]), columns + 1)
    others = Outliers(starts, numba.carray(integers(step[7]), step[13]))
    own = Outliers(operand.starts[: group.rows + 1], operand.columns[: operand.filled[0]])
    is_wanted, wanted, count = np.zeros(terms, np.bool_), np.empty(terms, np.int64), 0
    for i in range(own.columns.size):
        is_wanted[own.columns[i]] = True
    for k in range(terms):
        if is_wanted[k]:
            wanted[count] = k
            count += 1
    weights = numba.carray(floats(step[4]), columns * terms)
    add_rows(x, terms, own, wanted[:count], weights, step[11], step[12], others, np.int64(0), columns, columns, y)


@inline
def _product(step, group, operand):  # type: ignore[no-untyped-def]
    columns, terms, begin, bits = step[10], step[14], np.int64(0), np.int64(WEIGHT_BITS)
    panels = (columns + COLUMNS - 1) // COLUMNS
    y, bias = _at(step[8], group, columns), numba.carray(floats(step[9]), step[15])
    left = operand.blocks, operand.squares, operand.scales[: group.rows]
    right = (
        numba.carray(small_integers(step[2]), panels * COLUMNS * terms),
        numba.carray(doubles(step[3]), panels),
        numba.carray(floats(step[4]), columns * terms),
        numba.carray(integers(step[5]), columns),
    )
    end = (columns + _COLUMNS - 1) // _COLUMNS
    _contract(left, right, bits, bias, terms, columns, begin, end, y)
    if operand.filled[0] > 0 or step[13] > 0:
        _add_outliers(step, _at(step[1], group, terms), terms, y, columns, group, operand)


@inline
def _rotate(step, group):  # type: ignore[no-untyped-def]
    heads, dim, begin = step[5], step[6], np.int64(0)
    x = _at(step[1], group, heads * dim)
    cosine, sine = numba.carray(floats(step[3]), step[7]), numba.carray(floats(step[4]), step[7])
    positions = numba.carray(integers(step[2] + 8 * group.first), group.rows)
    if step[0] == ROTATE:
        rotate_rows(x, cosine, sine, positions, heads, dim, begin, group.rows)
    else:
        rotate_rows_back(x, cosine, sine, positions, heads, dim, begin, group.rows)


@inline
def _norm_back(step, unit, group, sums):  # type: ignore[no-untyped-def]
    """Returns the largest exponent of a row's contributions, or NOT_FINITE."""
    size, begin, rows = step[6], np.int64(0), group.rows * step[7]
    grad, x, dx = (
        _at(step[1], group, size * step[7]),
        _at(step[2], group, size * step[7]),
        _at(step[5], group, size * step[7]),
    )
    weight = numba.carray(floats(step[3]), size)
    inverse = numba.carray(doubles(step[4] + 8 * group.first * step[7]), rows)
    own_sums = sums[step[8] : step[8] + step[9]]
    return backward_rows(grad, x, weight, inverse, begin, rows, dx, step[10], unit, own_sums)


@inline
def _apply(step, real, group, operand, sums):  # type: ignore[no-untyped-def]
    """One step over a group of rows; the largest exponent of a norm's contributions, or NOT_FINITE."""
    op, finite = step[0], True
    if op == NORM:
        finite = _norm(step, real, group)
    elif op == GRID:
        finite = _grid(step, group, operand)
    elif op == PRODUCT:
        _product(step, group, operand)
    elif op == NORM_BACK:
        return _norm_back(step, real, group, sums)
    elif op == SILU:
        width = step[4]
        silu_times_flat(_at(step[1], group, width), _at(step[2], group, width), _at(step[3], group, width))
    elif op == SILU_BACK:
        width = step[6]
        grad, gate, up = _at(step[1], group, width), _at(step[2], group, width), _at(step[3], group, width)
        silu_times_backward_flat(grad, gate, up, _at(step[4], group, width), _at(step[5], group, width))
    elif op == ADD:
        width = step[4]
        add_flat(_at(step[1], group, width), _at(step[2], group, width), _at(step[3], group, width))
    else:
        _rotate(step, group)
    return np.int64(NO_GRID if finite else NOT_FINITE)


@kernel
def _run(steps, reals, first, last, rows, operand, scratch, sums, tops):  # type: ignore[no-untyped-def]
    """Whether all numbers were finite; tops[i] = max(tops[i], what step i returned)."""
    width = scratch.size // SCRATCH
    for start in range(first, last, rows):
        group = _Group(start, min(rows, last - start), scratch, width)
        for i in range(len(steps)):
            top = _apply(steps[i], reals[i], group, operand, sums)
            if top == NOT_FINITE:
                return False
            tops[i] = max(tops[i], top)
    return True


class Done(NamedTuple):
    """What the norms of a program found, by step: the largest exponents of their contributions; and all their sums."""

    tops: np.ndarray  # int64 [S]
    sums: np.ndarray  # int64


def _memory(rows: int, terms: int) -> np.ndarray:
    """That of the operand of a group of rows."""
    return np.empty(digits_size(rows // ROWS, terms), np.int32) if digits.IN_USE else np.empty(rows * terms)


def run(steps: Sequence[Step], first: int, last: int, nanoseconds: float, sums: int = 0) -> Done | None:
    """Apply a program to rows first..last-1, on all threads; None where a number is not finite.

    `nanoseconds` of a row decide how many threads are worth waking. The steps' norms add up `sums` numbers.
    """
    table = np.array([step.fields + (0,) * (FIELDS - len(step.fields)) for step in steps], np.int64)
    reals, terms = np.array([step.real for step in steps]), max(step.terms for step in steps)
    width, most = max(step.width for step in steps), max(step.most for step in steps)
    rows = min(_MOST_ROWS, max(_CACHED // terms, 1)) // ROWS * ROWS or ROWS

    def part(begin: int, end: int) -> Done | None:
        done = Done(np.full(len(steps), NO_GRID), np.zeros(sums, np.int64))
        operand = _Operand(
            _memory(rows, terms), np.empty(rows // ROWS), np.empty(rows), np.empty(rows, np.bool_),
            np.empty(rows + 1, np.int64), np.empty(rows * most, np.int64), np.zeros(1, np.int64),
        )  # fmt: skip
        scratch = np.empty(SCRATCH * rows * width, np.float32)
        bounds = first + begin * ROWS, min(first + end * ROWS, last)
        return done if _run(table, reals, *bounds, rows, operand, scratch, done.sums, done.tops) else None

    parts = results_of_parts(part, -(-(last - first) // ROWS), ROWS * nanoseconds)
    found = [done for done in parts if done is not None]
    if len(found) < len(parts):
        return None
    if len(found) == 1:
        return found[0]
    nothing = Done(np.full(len(steps), NO_GRID), np.zeros(sums, np.int64))  # where there are no rows
    tops, totals = zip(nothing, *found, strict=True)
    return Done(np.maximum.reduce(tops), np.add.reduce(totals))
