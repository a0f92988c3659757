"""Products of some rows by 16-bit digits (`digits`) of weights that are made once, for decoding, as in `few_rows`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ppo_repro.numerics.arithmetic.grid import INPUT_BITS, INPUT_GAP
from ppo_repro.numerics.kernels.core.compile import inline, kernel, kernel_part
from ppo_repro.numerics.kernels.core.memory import zero_bytes
from ppo_repro.numerics.kernels.float64.digit_product import DEPTH, add_tile, group_of
from ppo_repro.numerics.kernels.float64.digits import (
    BLOCK,
    COLUMNS,
    DIGITS,
    PAIR,
    PANEL,
    block_digits,
    panel_digits,
    rounded_integers,
)
from ppo_repro.numerics.kernels.float64.inputs import fill_block
from ppo_repro.numerics.kernels.float64.operands import Weight, squares_of_block
from ppo_repro.numerics.kernels.float64.tiles import ROWS

MOST_TERMS = DEPTH  # whose sums int64 holds
_WHOLE = 2.0**INPUT_BITS


class DigitRows(NamedTuple):
    """Memory for rows on their grids, flat; `squares` as in `operands`."""

    digits: np.ndarray  # int32 [R / ROWS, DIGITS, terms / 2, ROWS]
    squares: np.ndarray  # float64 [R / ROWS]
    scales: np.ndarray  # float64 [R]
    block: np.ndarray  # float64 [terms, ROWS], of one block
    exponents: np.ndarray  # int64 [R]
    outliers: np.ndarray  # bool [R], whether a row has some
    sums: np.ndarray  # int64 [BLOCK]
    scratch: np.ndarray  # int32 [DIGITS BLOCK]
    rounded: np.ndarray  # float32 [BLOCK]


@inline
def _size(blocks, terms):  # type: ignore[no-untyped-def]
    """Numbers of `blocks` blocks of rows."""
    return blocks * DIGITS * ((terms + 1) // 2) * ROWS


@inline
def make_digit_rows(rows, terms):  # type: ignore[no-untyped-def]
    blocks = (rows + ROWS - 1) // ROWS
    return DigitRows(
        np.empty(_size(blocks, terms), np.int32),
        np.empty(blocks),
        np.empty(rows),
        np.empty(terms * ROWS),
        np.empty(rows, np.int64),
        np.zeros(rows, np.bool_),
        np.empty(BLOCK, np.int64),
        np.empty(DIGITS * BLOCK, np.int32),
        np.empty(BLOCK, np.float32),
    )


@inline
def worth_digits(rows):  # type: ignore[no-untyped-def]
    """Whether digits are faster than float64, in which a block may have fewer rows: at most a fifth are missing."""
    return 5 * rows >= 4 * ((rows + ROWS - 1) // ROWS * ROWS)


@kernel_part
def put_in_digits(x, terms, most, own, limits):  # type: ignore[no-untyped-def]
    """`few_rows.put_on_grid` of flat x [R, terms], as digits into `own`."""
    result, size = 1, _size(1, terms)
    own.outliers[:] = False
    for block in range(own.squares.size):
        if not fill_block(
            x, terms, INPUT_GAP, most, INPUT_BITS, block, own.block, own.scales, own.exponents, own.outliers
        ):
            return 0
        target = own.digits.ctypes.data + PAIR * block * size
        block_digits(own.block.ctypes.data, terms, target, PAIR * (size // DIGITS))
        own.squares[block] = squares_of_block(own.block, terms)
    for r in range(limits.size):
        limits[r] = np.inf
        if own.outliers[r]:
            result, limits[r] = 2, np.float32(own.scales[r] * _WHOLE)
    return result


@kernel_part
def multiply_by_digits(own, terms, weights, squares, column_scales, bias, columns, y):  # type: ignore[no-untyped-def]
    """y = fl32(sum of x w on their grids) + 0 + bias, flat y [R, columns] float32, without outliers.

    weights and squares are those of `weight_digits`: an address and an array; column_scales and bias addresses of
    float64 and float32 [N], padded to whole panels.
    """
    rows, pairs = own.scales.size, (terms + 1) // 2
    left_apart, right_apart, size = PAIR * ROWS * pairs, PAIR * COLUMNS * pairs, _size(1, terms)
    sums, scratch = own.sums.ctypes.data, own.scratch.ctypes.data
    for tile in range((columns + COLUMNS - 1) // COLUMNS):
        start = tile * COLUMNS
        width, right = min(COLUMNS, columns - start), weights + tile * DIGITS * right_apart
        for block in range(own.squares.size):
            height, place = min(ROWS, rows - block * ROWS), block * ROWS * columns + start
            target, stride = y.ctypes.data + 4 * place, 4 * columns
            if width % 8 != 0:  # whole vectors would reach beyond y
                target, stride = own.rounded.ctypes.data, 4 * COLUMNS
            left, scales = own.digits.ctypes.data + PAIR * block * size, own.scales.ctypes.data + 8 * ROWS * block
            own.sums[:] = 0
            group = group_of(own.squares[block], squares[tile])
            add_tile(left, right, left_apart, right_apart, pairs, width, group, scratch, sums)
            factors, offsets = column_scales + 8 * start, bias + 4 * start
            rounded_integers(sums, scales, factors, offsets, target, stride, height, width)
            if target == own.rounded.ctypes.data:
                for i in range(height):
                    for c in range(width):
                        y[place + i * columns + c] = own.rounded[i * COLUMNS + c]


@kernel
def _fill_weight_digits(panels, terms, count, out):  # type: ignore[no-untyped-def]
    pairs = (terms + 1) // 2
    for panel in range(count):
        tile, half = panel // 2, panel % 2
        target = out.ctypes.data + PAIR * (tile * DIGITS * pairs * COLUMNS + half * PANEL)
        panel_digits(panels.ctypes.data + 4 * PANEL * panel * terms, terms, target, PAIR * COLUMNS * pairs)


def weight_digits(weight: Weight, terms: int) -> tuple[np.ndarray, np.ndarray]:
    """Digits int32 [N / COLUMNS, DIGITS, terms / 2, COLUMNS] of a weight with panels, and `squares` of its tiles."""
    count = weight.squares.size
    tiles = -(-count // 2)
    out = zero_bytes(PAIR * tiles * DIGITS * ((terms + 1) // 2) * COLUMNS).view(np.int32)
    _fill_weight_digits(weight.panels, terms, count, out)
    squares = np.zeros(2 * tiles)
    squares[:count] = weight.squares
    return out, squares.reshape(tiles, 2).max(axis=1)
