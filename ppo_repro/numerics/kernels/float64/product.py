"""Contractions and integer gradients by exact products in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ppo_repro.numerics.arithmetic.grid import HIGH_START, WEIGHT_BITS
from ppo_repro.numerics.kernels.core.compile import inline, kernel
from ppo_repro.numerics.kernels.core.pool import in_parts
from ppo_repro.numerics.kernels.core.scalar import pow2_64, round_to_f32_plus_zero
from ppo_repro.numerics.kernels.float64.operands import (
    Inputs,
    Weight,
    pack_columns,
    scaled_blocks,
    scaled_panels,
)
from ppo_repro.numerics.kernels.float64.tiles import BLOCK, COLUMNS, ROWS, multiply

# terms multiplied at a time: a panel of so many stays in the second-level cache
_DEPTH = 4096
_NANOSECONDS = 0.025  # of a product; only to decide how many threads are worth waking


@inline
def _store(high, low, at, rows, first_row, first_column, scales, column_scales, bias, y, columns):  # type: ignore[no-untyped-def]
    """Round a block of sums and write it to flat y [.., columns]."""
    width = min(COLUMNS, columns - first_column)
    for i in range(rows):
        start = (first_row + i) * columns + first_column
        out, scale = y[start : start + width], scales[first_row + i]
        h, w = high[at + i * COLUMNS : at + i * COLUMNS + width], low[at + i * COLUMNS : at + i * COLUMNS + width]
        if bias.size:
            b = bias[first_column : first_column + width]
            for c in range(width):
                out[c] = round_to_f32_plus_zero(((h[c] - HIGH_START) + w[c]) * scale * column_scales[c]) + b[c]
        else:
            for c in range(width):
                out[c] = round_to_f32_plus_zero(((h[c] - HIGH_START) + w[c]) * scale * column_scales[c])


@kernel
def _contract(blocks, scales, panels, w, exponents, bits, bias, terms, columns, first, last, y):  # type: ignore[no-untyped-def]
    """Panels first..last-1 of `contract`, flat; empty `panels`: they are packed from flat w [terms, columns]."""
    rows = scales.size
    count = (rows + ROWS - 1) // ROWS
    high, low, column_scales = np.empty(count * BLOCK), np.empty(count * BLOCK), np.zeros(COLUMNS)
    scratch = np.empty(0 if panels.size else min(terms, _DEPTH) * COLUMNS, np.int32)
    for panel in range(first, last):
        for c in range(min(COLUMNS, columns - panel * COLUMNS)):
            column_scales[c] = pow2_64(exponents[panel * COLUMNS + c] - bits)
        high[:], low[:] = HIGH_START, 0.0
        for start in range(0, terms, _DEPTH):
            depth = min(_DEPTH, terms - start)
            right = panels.ctypes.data + 4 * COLUMNS * (panel * terms + start)
            if not panels.size:
                pack_columns(w, columns, panel, start, start + depth, exponents, bits, scratch)
                right = scratch.ctypes.data
            for block in range(count):
                left, at = blocks.ctypes.data + 8 * ROWS * (block * terms + start), 8 * block * BLOCK
                multiply(
                    left, right, high.ctypes.data + at, low.ctypes.data + at, depth, min(ROWS, rows - block * ROWS)
                )
        for block in range(count):
            height = min(ROWS, rows - block * ROWS)
            _store(
                high, low, block * BLOCK, height, block * ROWS, panel * COLUMNS, scales, column_scales, bias, y, columns
            )


def contract(x: Inputs, weight: Weight, w: np.ndarray, bias: np.ndarray, y: np.ndarray) -> bool:
    """y = fl32(sum of x w on their grids) + 0 [+ bias], without outliers; y [M, N] float32, C-contiguous.

    w [K, N] float32 is needed where `weight` has no panels. Returns False, with y undefined, if an operand holds an
    infinity or NaN.
    """
    if not (x.finite and weight.finite):
        return False
    rows, columns = y.shape
    terms = x.blocks.size // (-(-rows // ROWS) * ROWS) if rows else 0
    arguments = x.blocks, x.scales, weight.panels, w.reshape(-1), weight.exponents, WEIGHT_BITS, bias, terms, columns
    flat = y.reshape(-1)
    work = lambda i, j: _contract(*arguments, i, j, flat)  # noqa: E731
    in_parts(work, -(-columns // COLUMNS), _NANOSECONDS * rows * terms * COLUMNS)
    return True


@dataclass(frozen=True)
class GradientInputs:
    """The inputs of a layer as a right operand whose terms are tokens."""

    panels: np.ndarray  # int32 [K / COLUMNS, T, COLUMNS]
    tokens: int
    columns: int


def pack_inputs(x: np.ndarray, x_up: np.ndarray) -> GradientInputs:
    """rne(x[t, k] x_up[t]), at most 2^22; x [T, K] float32, x_up [T] float64, C-contiguous."""
    return GradientInputs(scaled_panels(x, x_up), *x.shape)


@kernel
def _accumulate(grad, up, rows, panels, tokens, columns, first, last, fresh, sums):  # type: ignore[no-untyped-def]
    """Row blocks first..last-1 of `accumulate`, flat."""
    left, high, low = np.empty(tokens * ROWS), np.empty(BLOCK), np.empty(BLOCK)
    for block in range(first, last):
        height = min(ROWS, rows - block * ROWS)
        scaled_blocks(grad, rows, up, block, block + 1, left)
        for panel in range((columns + COLUMNS - 1) // COLUMNS):
            width = min(COLUMNS, columns - panel * COLUMNS)
            high[:], low[:] = HIGH_START, 0.0
            right = panels.ctypes.data + 4 * COLUMNS * panel * tokens
            multiply(left.ctypes.data, right, high.ctypes.data, low.ctypes.data, tokens, height)
            for i in range(height):
                start = (block * ROWS + i) * columns + panel * COLUMNS
                out = sums[start : start + width]
                h, w = high[i * COLUMNS : i * COLUMNS + width], low[i * COLUMNS : i * COLUMNS + width]
                for c in range(width):
                    total = np.int64(h[c] - HIGH_START) + np.int64(w[c])
                    out[c] = total if fresh else out[c] + total


def accumulate(grad: np.ndarray, up: np.ndarray, x: GradientInputs, sums: np.ndarray, fresh: bool) -> None:
    """sums[n, k] += sum_t rne(grad[t, n] up[t]) x[t, k], exactly; `fresh` sums are overwritten.

    grad [T, N] float32, up [T] float64, sums [N, K] int64, all C-contiguous. The integers of grad are at most 2^27, and
    the sum of all products fits into int64.
    """
    rows, columns = sums.shape
    arguments, flat = (grad.reshape(-1), up, rows, x.panels, x.tokens, columns), sums.reshape(-1)
    work = lambda i, j: _accumulate(*arguments, i, j, fresh, flat)  # noqa: E731
    in_parts(work, -(-rows // ROWS), _NANOSECONDS * ROWS * x.tokens * columns)
