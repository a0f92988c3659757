"""Contractions and integer gradients by products of 16-bit digits (`digits`): those of `product`, the same bits."""

from __future__ import annotations

import math

import numpy as np

from ppo_repro.numerics.arithmetic.grid import (
    GRADIENT_BITS,
    GRADIENT_INPUT_BITS,
    HIGH_START,
    INPUT_BITS,
    WEIGHT_BITS,
)
from ppo_repro.numerics.kernels.core.compile import inline, kernel
from ppo_repro.numerics.kernels.core.scalar import pow2_64
from ppo_repro.numerics.kernels.float64.digits import (
    BASE,
    BLOCK,
    COLUMNS,
    DIGITS,
    LANES,
    PAIR,
    PANEL,
    add_tile_of_1,
    add_tile_of_2,
    add_tile_of_3,
    block_digits,
    panel_digits,
    rounded_integers,
)
from ppo_repro.numerics.kernels.float64.operands import pack_columns, squares_of_panel
from ppo_repro.numerics.kernels.float64.tiles import ROWS, SQUARED
from ppo_repro.numerics.kernels.float64.token_operands import scaled_block
from ppo_repro.numerics.kernels.float64.vectors import rounded_sums

DEPTH = 2048  # terms multiplied at a time: the digits of a right operand of so many stay in the second-level cache
_LOW = 1 << (BASE - 1)  # largest low digit
_INT32 = (1 << 31) - 1
_ZERO = np.float32(0.0)
_SPLIT = 20  # bits of an int64 sum that go to `low`: `high` is a multiple of 2^20
_rounded_sums = rounded_sums(COLUMNS, HIGH_START)


def most_pairs(left: int, right: int) -> int:
    """Pairs of terms whose digit sums int32 holds, of integers up to `left` and `right`.

    The largest is |a1 b0 + a0 b1|; a sum of three digit products may pass 2^31 and come back, as int32 wraps.
    """
    a1, b1 = left // (1 << BASE) + 1, right // (1 << BASE) + 1
    return max(1, _INT32 // max(2 * (a1 * _LOW + _LOW * b1), 2 * _LOW * _LOW, 2 * a1 * b1))


_LEAST = most_pairs(1 << INPUT_BITS, 1 << WEIGHT_BITS)
_LEAST_OF_GRADIENT = most_pairs(1 << GRADIENT_BITS, 1 << GRADIENT_INPUT_BITS)
# of a longer group; its terms lie in at most two of the parts over which squares are added
_PAIRS = 3 * SQUARED // 4
_ROOT = math.sqrt(2 * _PAIRS)


@inline
def long_group(left, right):  # type: ignore[no-untyped-def]
    """Whether int32 holds the sums of _PAIRS pairs, given the `squares` of a block and of a panel; see `operands`.

    sum |a1 b0| <= sqrt(sum a1^2) sqrt(sum b0^2) by Cauchy and Schwarz, and |a1| <= |a| 2^-13 + 1/2, |b0| <= 2^12.
    """
    high = (np.sqrt(2.0 * left) + np.sqrt(2.0 * right)) / (1 << BASE) + _ROOT
    return _LOW * _ROOT * high < 0.99 * _INT32


@inline
def group_of(left, right):  # type: ignore[no-untyped-def]
    """Pairs of terms whose digit sums int32 holds, of inputs and weights with these `squares`."""
    return _PAIRS if long_group(left, right) else _LEAST


@inline
def add_tile(left, right, left_apart, right_apart, pairs, width, group, scratch, sums):  # type: ignore[no-untyped-def]
    """sums += left right of `width` columns; see `digits._tile`."""
    if width <= LANES:
        add_tile_of_1(left, right, left_apart, right_apart, pairs, group, scratch, sums)
    elif width <= 2 * LANES:
        add_tile_of_2(left, right, left_apart, right_apart, pairs, group, scratch, sums)
    else:
        add_tile_of_3(left, right, left_apart, right_apart, pairs, group, scratch, sums)


@inline
def _split(sums, high, low):  # type: ignore[no-untyped-def]
    """high + low += sums, exactly."""
    for c in range(BLOCK):
        above = sums[c] >> _SPLIT << _SPLIT
        high[c] += np.float64(above)
        low[c] += np.float64(sums[c] - above)


@kernel
def contract_digits(x, weight, bits, bias, terms, columns, first, last, y):  # type: ignore[no-untyped-def]
    """Pairs of panels first..last-1 of `product.contract`, flat; the arguments of `contract_panels`."""
    (blocks, left_squares, scales), (panels, right_squares, w, exponents) = x, weight
    rows, whole_pairs = scales.size, (terms + 1) // 2
    count = (rows + ROWS - 1) // ROWS
    apart = BLOCK if terms > DEPTH else 0
    size = BLOCK + max(count - 1, 0) * apart
    high, low, column_scales = np.empty(size), np.empty(size), np.zeros(COLUMNS)
    own_bias, rounded, sums = np.zeros(COLUMNS, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.int64)
    depth = min(DEPTH, terms)
    scratch, digits = np.empty(DIGITS * BLOCK, np.int32), np.zeros(DIGITS * ((depth + 1) // 2) * COLUMNS, np.int32)
    packed = np.empty(0 if panels.size else depth * PANEL, np.int32)
    factors, offsets, places = column_scales.ctypes.data, own_bias.ctypes.data, sums.ctypes.data
    for tile in range(first, last):
        width = min(COLUMNS, columns - tile * COLUMNS)
        for c in range(width):
            column_scales[c] = pow2_64(exponents[tile * COLUMNS + c] - bits)
            own_bias[c] = bias[tile * COLUMNS + c] if bias.size else _ZERO
        for start in range(0, terms, DEPTH):
            depth = min(DEPTH, terms - start)
            pairs = (depth + 1) // 2
            right_apart, left_apart = PAIR * COLUMNS * pairs, PAIR * ROWS * whole_pairs
            square = 0.0
            for c in range(0, width, PANEL):
                panel = (tile * COLUMNS + c) // PANEL
                if panels.size:
                    source, largest = panels.ctypes.data + 4 * PANEL * (panel * terms + start), right_squares[panel]
                else:
                    pack_columns(w, columns, panel, start, start + depth, exponents, bits, packed)
                    source, largest = packed.ctypes.data, squares_of_panel(packed, depth)
                square = max(square, largest)
                panel_digits(source, depth, digits.ctypes.data + PAIR * c, right_apart)
            for block in range(count):
                height, at = min(ROWS, rows - block * ROWS), block * apart
                place = block * ROWS * columns + tile * COLUMNS
                target, stride = y.ctypes.data + 4 * place, 4 * columns
                if width % 8 != 0 or (apart > 0 and width < COLUMNS):
                    target, stride = rounded.ctypes.data, 4 * COLUMNS
                left = blocks.ctypes.data + PAIR * ROWS * (block * DIGITS * whole_pairs + start // 2)
                scale = scales.ctypes.data + 8 * ROWS * block
                group = group_of(left_squares[block], square)
                sums[:] = 0
                add_tile(
                    left, digits.ctypes.data, left_apart, right_apart, pairs, width, group, scratch.ctypes.data, places
                )  # fmt: skip
                if apart == 0:
                    rounded_integers(places, scale, factors, offsets, target, stride, height, width)
                else:
                    h, lo = high[at : at + BLOCK], low[at : at + BLOCK]
                    if start == 0:
                        h[:], lo[:] = HIGH_START, 0.0
                    _split(sums, h, lo)
                    if start + depth == terms:
                        addresses = h.ctypes.data, lo.ctypes.data
                        _rounded_sums(addresses[0], addresses[1], scale, factors, offsets, target, stride, height)
                if target == rounded.ctypes.data and start + depth == terms:
                    for i in range(height):
                        row, out = rounded[i * COLUMNS : i * COLUMNS + width], y[place + i * columns :]
                        for c in range(width):
                            out[c] = row[c]


@kernel
def accumulate_digits(grad, up, rows, digits, squares, tokens, columns, first, last, fresh, sums):  # type: ignore[no-untyped-def]
    """Row blocks first..last-1 of `product.accumulate`, flat; digits of the inputs those of `scaled_digits`."""
    pairs = (tokens + 1) // 2
    left, halves = np.empty(tokens * ROWS), np.empty(DIGITS * pairs * ROWS, np.int32)
    integers, scratch = np.empty(BLOCK, np.int64), np.empty(DIGITS * BLOCK, np.int32)
    left_apart, right_apart = PAIR * ROWS * pairs, PAIR * COLUMNS * pairs
    for block in range(first, last):
        height = min(ROWS, rows - block * ROWS)
        own_square = scaled_block(grad, rows, up, block, left)
        block_digits(left.ctypes.data, tokens, halves.ctypes.data, left_apart)
        for tile in range((columns + COLUMNS - 1) // COLUMNS):
            width, place = min(COLUMNS, columns - tile * COLUMNS), block * ROWS * columns + tile * COLUMNS
            right, square = digits.ctypes.data + tile * DIGITS * right_apart, squares[2 * tile]
            if width > PANEL:
                square = max(square, squares[2 * tile + 1])
            group = _PAIRS if long_group(own_square, square) else _LEAST_OF_GRADIENT
            integers[:] = 0
            add_tile(
                halves.ctypes.data, right, left_apart, right_apart, pairs, width, group, scratch.ctypes.data,
                integers.ctypes.data,
            )  # fmt: skip
            for i in range(height):
                out = sums[place + i * columns : place + i * columns + width]
                row = integers[i * COLUMNS : i * COLUMNS + width]
                for c in range(width):
                    out[c] = row[c] if fresh else out[c] + row[c]
