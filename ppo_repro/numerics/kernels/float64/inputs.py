"""Inputs of linear layers on their grids: left operands, as float64 or as digits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ppo_repro.numerics.arithmetic.contraction import most_outliers
from ppo_repro.numerics.arithmetic.grid import INPUT_BITS, INPUT_GAP
from ppo_repro.numerics.kernels.core.compile import kernel, kernel_part
from ppo_repro.numerics.kernels.core.pool import results_of_parts
from ppo_repro.numerics.kernels.core.rows import NOTHING, grid_exponent
from ppo_repro.numerics.kernels.core.scalar import INFINITY_BITS, exponent32, pow2_32, pow2_64
from ppo_repro.numerics.kernels.float64 import digits
from ppo_repro.numerics.kernels.float64.digits import DIGITS, PAIR, block_digits
from ppo_repro.numerics.kernels.float64.operands import grid_without_outliers, on_grid, squares_of_block
from ppo_repro.numerics.kernels.float64.tiles import ROWS
from ppo_repro.numerics.kernels.float64.vectors import LANES, largest_bits_at, rows_on_grids

_ONE = np.float32(1.0)
# fewer rows are multiplied in float64: the digits of the weights are made anew for each product, which takes longer
# than digits save with few rows
FEWEST_ROWS = 48
_block_of_rows = rows_on_grids(False, ROWS)


@dataclass(frozen=True)
class Inputs:
    """Inputs [M, K] on grids of 26 bits, without their outliers."""

    blocks: np.ndarray  # float64 [M / ROWS, K, ROWS], or int32 [M / ROWS, DIGITS, K / 2, ROWS] of digits
    squares: np.ndarray  # float64 [M / ROWS]
    scales: np.ndarray  # float64 [M]
    exponents: np.ndarray  # int64 [M] of the largest number of each row, see `rows.row_exponents`
    outliers: np.ndarray  # bool [M], rows that have some
    finite: bool
    terms: int

    @property
    def in_digits(self) -> bool:
        """Whether `blocks` are digits."""
        return self.blocks.dtype == np.int32


def digits_size(blocks: int, terms: int) -> int:
    """Numbers of `blocks` blocks as digits."""
    return blocks * DIGITS * ((terms + 1) // 2) * ROWS


@kernel_part
def fill_block(x, terms, gap, most, bits, block, out, scales, exponents, outliers):  # type: ignore[no-untyped-def]
    """A block as float64; whether it is finite."""
    finite, one, rows = True, _ONE, scales.size
    ups, limits = np.zeros(ROWS), np.full(ROWS, _ONE)
    height = min(ROWS, rows - block * ROWS)
    for i in range(height):
        r = block * ROWS + i
        largest = largest_bits_at(x.ctypes.data + 4 * r * terms, terms)
        if largest >= INFINITY_BITS:
            finite = False
            continue
        e, has_none = grid_without_outliers(x.ctypes.data + 4 * r * terms, terms, largest, one, gap, most)
        if not has_none:
            e, outliers[r] = grid_exponent(x[r * terms : r * terms + terms], one, gap, most)
        exponents[r] = NOTHING if largest == 0 else exponent32(largest)
        scales[r], ups[i] = pow2_64(e - bits), pow2_64(bits - e)
        limits[i] = pow2_32(e) if e < 128 else np.float32(np.inf)
    done = 0
    if height == ROWS:
        done = terms // LANES * LANES
        source = x.ctypes.data + 4 * block * ROWS * terms
        _block_of_rows(source, 4 * terms, one, limits.ctypes.data, ups.ctypes.data, out.ctypes.data, done)
    for i in range(ROWS):
        up, limit = ups[i], limits[i]
        at = (block * ROWS + min(i, height - 1)) * terms
        for k in range(done, terms):
            out[k * ROWS + i] = on_grid(x[at + k], one, limit, up)
    return finite


@kernel
def fill_inputs(x, terms, gap, most, bits, first, last, blocks, squares, scales, exponents, outliers):  # type: ignore[no-untyped-def]
    finite = True
    for block in range(first, last):
        out = blocks[block * terms * ROWS : (block + 1) * terms * ROWS]
        finite &= fill_block(x, terms, gap, most, bits, block, out, scales, exponents, outliers)
        squares[block] = squares_of_block(out, terms)
    return finite


@kernel
def fill_digits(x, terms, gap, most, bits, first, last, blocks, squares, scales, exponents, outliers):  # type: ignore[no-untyped-def]
    """`fill_inputs` with blocks of digits."""
    finite, out, pairs = True, np.empty(terms * ROWS), (terms + 1) // 2
    for block in range(first, last):
        finite &= fill_block(x, terms, gap, most, bits, block, out, scales, exponents, outliers)
        target = blocks.ctypes.data + PAIR * block * DIGITS * pairs * ROWS
        block_digits(out.ctypes.data, terms, target, PAIR * pairs * ROWS)
        squares[block] = squares_of_block(out, terms)
    return finite


def quantise_inputs(x: np.ndarray) -> Inputs:
    """Inputs x [M, K] float32, C-contiguous, on their grids."""
    return quantised(x, digits.IN_USE and len(x) >= FEWEST_ROWS)


def quantised(x: np.ndarray, in_digits: bool) -> Inputs:
    """`quantise_inputs` in one of both forms."""
    rows, terms = x.shape
    count = -(-rows // ROWS)
    blocks = np.empty(digits_size(count, terms), np.int32) if in_digits else np.empty(count * terms * ROWS)
    squares = np.empty(count)
    scales, exponents = np.empty(rows), np.empty(rows, np.int64)
    outliers, flat = np.zeros(rows, np.bool_), x.reshape(-1)
    fill = fill_digits if in_digits else fill_inputs

    def run(first: int, last: int) -> bool:
        law = INPUT_GAP, most_outliers(terms), INPUT_BITS
        return bool(fill(flat, terms, *law, first, last, blocks, squares, scales, exponents, outliers))

    finite = results_of_parts(run, count, 0.5 * ROWS * terms)
    return Inputs(blocks, squares, scales, exponents, outliers, all(finite), terms)
