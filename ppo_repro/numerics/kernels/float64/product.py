"""Contractions and integer gradients by exact products: in float64, or of digits (`digit_product`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ppo_repro.numerics.arithmetic.grid import HIGH_START, WEIGHT_BITS
from ppo_repro.numerics.kernels.core.compile import inline, kernel
from ppo_repro.numerics.kernels.core.pool import in_parts
from ppo_repro.numerics.kernels.core.scalar import pow2_64
from ppo_repro.numerics.kernels.float64 import digits
from ppo_repro.numerics.kernels.float64.digit_product import accumulate_digits, contract_digits
from ppo_repro.numerics.kernels.float64.inputs import Inputs, digits_size
from ppo_repro.numerics.kernels.float64.operands import (
    Weight,
    pack_columns,
    pack_transposed,
    squares_of_panel,
)
from ppo_repro.numerics.kernels.float64.tiles import (
    BLOCK,
    COLUMNS,
    LANES,
    ROWS,
    exact_terms,
    multiply,
    multiply_and_round,
    multiply_exactly,
)
from ppo_repro.numerics.kernels.float64.token_operands import scaled_block, scaled_panels
from ppo_repro.numerics.kernels.float64.vectors import rounded_sums

# terms multiplied at a time: a panel of so many stays in the second-level cache
_DEPTH = 4096
# Every panel meets all rows of the left operand; what the caches cannot hold of them comes from memory each time.
_CACHED, _CACHED_DIGITS = 1 << 19, 1 << 21  # numbers of a left operand in one pass; of digits, 2,048 terms at a time
_PACKED = 1 << 24  # weights that are packed for several passes: 64 MiB
_ZERO = np.float32(0.0)
_NANOSECONDS = 0.025  # of a product; only to decide how many threads are worth waking

Arrays = tuple[np.ndarray, ...]

_rounded_sums = rounded_sums(COLUMNS, HIGH_START)


@inline
def _copy(block, rows, width, at, y, columns):  # type: ignore[no-untyped-def]
    """The first columns of a block of float32 to flat y [.., columns] from `at` on."""
    for i in range(rows):
        row, out = block[i * COLUMNS : i * COLUMNS + width], y[at + i * columns : at + i * columns + width]
        for c in range(width):
            out[c] = row[c]


@kernel
def contract_panels(x, weight, bits, bias, terms, columns, first, last, y):  # type: ignore[no-untyped-def]
    """Panels first..last-1 of `contract`, flat; empty `panels`: they are packed from flat w [terms, columns]."""
    (blocks, left_squares, scales), (panels, right_squares, w, exponents) = x, weight
    rows = scales.size
    count = (rows + ROWS - 1) // ROWS
    # the sums of every block are kept only where they go on in another part
    apart = BLOCK if terms > _DEPTH else 0
    size = BLOCK + max(count - 1, 0) * apart
    high, low, column_scales = np.empty(size), np.empty(size), np.zeros(COLUMNS)
    own_bias, rounded = np.zeros(COLUMNS, np.float32), np.empty(BLOCK, np.float32)
    scratch = np.empty(0 if panels.size else min(terms, _DEPTH) * COLUMNS, np.int32)
    factors, offsets = column_scales.ctypes.data, own_bias.ctypes.data
    for panel in range(first, last):
        width = min(COLUMNS, columns - panel * COLUMNS)
        for c in range(width):
            column_scales[c] = pow2_64(exponents[panel * COLUMNS + c] - bits)
            own_bias[c] = bias[panel * COLUMNS + c] if bias.size else _ZERO
        for start in range(0, terms, _DEPTH):
            depth = min(_DEPTH, terms - start)
            if panels.size:
                right, square = panels.ctypes.data + 4 * COLUMNS * (panel * terms + start), right_squares[panel]
            else:
                pack_columns(w, columns, panel, start, start + depth, exponents, bits, scratch)
                right, square = scratch.ctypes.data, squares_of_panel(scratch, depth)
            for block in range(count):
                height, at = min(ROWS, rows - block * ROWS), block * apart
                place = block * ROWS * columns + panel * COLUMNS
                left = blocks.ctypes.data + 8 * ROWS * (block * terms + start)
                scale = scales.ctypes.data + 8 * ROWS * block
                group = exact_terms(left_squares[block], square)
                is_exact = group >= terms and height == ROWS and apart == 0
                written = LANES if is_exact else COLUMNS  # columns at a time
                target, stride = y.ctypes.data + 4 * place, 4 * columns
                if width % written:
                    target, stride = rounded.ctypes.data, 4 * COLUMNS
                if is_exact:
                    multiply_and_round(left, right, depth, width, scale, factors, offsets, target, stride)
                else:
                    h, lo = high[at : at + BLOCK], low[at : at + BLOCK]
                    if start == 0:
                        h[:], lo[:] = HIGH_START, 0.0
                    sums = h.ctypes.data, lo.ctypes.data
                    multiply(left, right, sums[0], sums[1], depth, height, width, group)
                    if start + depth == terms:
                        _rounded_sums(sums[0], sums[1], scale, factors, offsets, target, stride, height)
                if width % written and start + depth == terms:
                    _copy(rounded, height, width, place, y, columns)


def contract(x: Inputs, weight: Weight, w: np.ndarray, bias: np.ndarray, y: np.ndarray) -> bool:
    """y = fl32(sum of x w on their grids) + 0 [+ bias], without outliers; y [M, N] float32, C-contiguous.

    w [K, N] float32 is needed where `weight` has no panels. Returns False, with y undefined, if an operand holds an
    infinity or NaN.
    """
    if not (x.finite and weight.finite):
        return False
    rows, columns = y.shape
    terms, wide = x.terms, digits.COLUMNS if x.in_digits else COLUMNS
    block_size = digits_size(1, terms) if x.in_digits else terms * ROWS
    cached = _CACHED_DIGITS if x.in_digits else _CACHED
    blocks, together = -(-rows // ROWS), max(cached // (ROWS * max(terms, 1)), 1)
    if together < blocks and not weight.panels.size:
        if w.size <= _PACKED:
            weight = pack_transposed(w, weight)
        else:  # packed as it is read, once
            together = blocks
    right, work = (weight.panels, weight.squares, w.reshape(-1), weight.exponents), _NANOSECONDS * terms
    for block in range(0, blocks, together):
        first, last = block * ROWS, min((block + together) * ROWS, rows)
        left = x.blocks[block * block_size :], x.squares[block:], x.scales[first:last]
        part = _on_panels(left, right, bias, terms, y[first:last])
        in_parts(part, -(-columns // wide), work * (last - first) * wide)
    return True


def _on_panels(x: Arrays, weight: Arrays, bias: np.ndarray, terms: int, y: np.ndarray) -> Callable[[int, int], None]:
    columns, flat = y.shape[1], y.reshape(-1)
    kernel = contract_digits if x[0].dtype == np.int32 else contract_panels
    return lambda i, j: kernel(x, weight, WEIGHT_BITS, bias, terms, columns, i, j, flat)


@dataclass(frozen=True)
class GradientInputs:
    """The inputs of a layer as a right operand whose terms are tokens."""

    panels: np.ndarray  # see `scaled_panels`
    squares: np.ndarray  # float64 [K / COLUMNS]
    tokens: int
    columns: int
    in_digits: bool


def pack_inputs(x: np.ndarray, x_up: np.ndarray) -> GradientInputs:
    """rne(x[t, k] x_up[t]), at most 2^22; x [T, K] float32, x_up [T] float64, C-contiguous."""
    return packed_inputs(x, x_up, digits.IN_USE)


def packed_inputs(x: np.ndarray, x_up: np.ndarray, in_digits: bool) -> GradientInputs:
    """`pack_inputs` in one of both forms."""
    (panels, squares), (tokens, columns) = scaled_panels(x, x_up, in_digits), x.shape
    return GradientInputs(panels, squares, tokens, columns, in_digits)


@kernel
def _accumulate(grad, up, rows, panels, squares, tokens, columns, first, last, fresh, sums):  # type: ignore[no-untyped-def]
    """Row blocks first..last-1 of `accumulate`, flat."""
    left, high, low, integers = np.empty(tokens * ROWS), np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK, np.int64)
    for block in range(first, last):
        height = min(ROWS, rows - block * ROWS)
        square = scaled_block(grad, rows, up, block, left)
        for panel in range((columns + COLUMNS - 1) // COLUMNS):
            width = min(COLUMNS, columns - panel * COLUMNS)
            right, place = panels.ctypes.data + 4 * COLUMNS * panel * tokens, block * ROWS * columns + panel * COLUMNS
            group = exact_terms(square, squares[panel])
            if group >= tokens:
                if fresh and width % LANES == 0 and height == ROWS:
                    multiply_exactly(left.ctypes.data, right, tokens, width, sums.ctypes.data + 8 * place, 8 * columns)
                    continue
                multiply_exactly(left.ctypes.data, right, tokens, width, integers.ctypes.data, 8 * COLUMNS)
            else:
                high[:], low[:] = HIGH_START, 0.0
                multiply(left.ctypes.data, right, high.ctypes.data, low.ctypes.data, tokens, height, width, group)
                for c in range(BLOCK):
                    integers[c] = np.int64(high[c] - HIGH_START) + np.int64(low[c])
            for i in range(height):
                out = sums[place + i * columns : place + i * columns + width]
                row = integers[i * COLUMNS : i * COLUMNS + width]
                for c in range(width):
                    out[c] = row[c] if fresh else out[c] + row[c]


def accumulate(grad: np.ndarray, up: np.ndarray, x: GradientInputs, sums: np.ndarray, fresh: bool) -> None:
    """sums[n, k] += sum_t rne(grad[t, n] up[t]) x[t, k], exactly; `fresh` sums are overwritten.

    grad [T, N] float32, up [T] float64, sums [N, K] int64, all C-contiguous. The integers of grad are at most 2^27, and
    the sum of all products fits into int64.
    """
    rows, columns = sums.shape
    flat_grad, flat = grad.reshape(-1), sums.reshape(-1)

    def work(first: int, last: int) -> None:
        if x.in_digits:
            accumulate_digits(flat_grad, up, rows, x.panels, x.squares, x.tokens, columns, first, last, fresh, flat)
        else:
            _accumulate(flat_grad, up, rows, x.panels, x.squares, x.tokens, columns, first, last, fresh, flat)

    in_parts(work, -(-rows // ROWS), _NANOSECONDS * ROWS * x.tokens * columns)
