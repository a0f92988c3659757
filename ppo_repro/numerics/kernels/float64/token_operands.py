"""Operands of products in float64 whose terms are tokens: output gradients and inputs of layers, see `operands`."""

from __future__ import annotations

import numpy as np

from ppo_repro.numerics.kernels.core.compile import kernel, kernel_part
from ppo_repro.numerics.kernels.core.pool import in_parts
from ppo_repro.numerics.kernels.float64 import digits
from ppo_repro.numerics.kernels.float64.digits import DIGITS, PAIR, panel_digits
from ppo_repro.numerics.kernels.float64.operands import squares_of_block, squares_of_panel
from ppo_repro.numerics.kernels.float64.tiles import COLUMNS, ROWS
from ppo_repro.numerics.kernels.float64.vectors import terms_on_grids

_block_of_terms, _panel_of_terms = terms_on_grids(False, ROWS), terms_on_grids(True, COLUMNS)


@kernel_part
def _scaled_panel(x, columns, up, panel, out):  # type: ignore[no-untyped-def]
    """A panel of `scaled_panels`, flat. Returns its square."""
    terms, start = up.size, panel * COLUMNS
    width = min(COLUMNS, columns - start)
    if width == COLUMNS:
        _panel_of_terms(x.ctypes.data + 4 * start, 4 * columns, up.ctypes.data, out.ctypes.data, terms)
    for t in range(0 if width < COLUMNS else terms, terms):
        row, target = x[t * columns + start : t * columns + start + width], out[t * COLUMNS : (t + 1) * COLUMNS]
        for c in range(width):
            target[c] = np.int32(np.rint(np.float64(row[c]) * up[t]))
        for c in range(width, COLUMNS):
            target[c] = 0
    return squares_of_panel(out, terms)


@kernel
def _scaled_panels(x, columns, up, first, last, panels, squares):  # type: ignore[no-untyped-def]
    size = up.size * COLUMNS
    for panel in range(first, last):
        squares[panel] = _scaled_panel(x, columns, up, panel, panels[panel * size : (panel + 1) * size])


@kernel
def _scaled_digits(x, columns, up, first, last, panels, squares):  # type: ignore[no-untyped-def]
    terms = up.size
    out, apart = np.empty(terms * COLUMNS, np.int32), PAIR * digits.COLUMNS * ((terms + 1) // 2)
    for panel in range(first, last):
        squares[panel] = _scaled_panel(x, columns, up, panel, out)
        tile, side = panel // 2, panel % 2
        target = panels.ctypes.data + tile * DIGITS * apart + PAIR * COLUMNS * side
        panel_digits(out.ctypes.data, terms, target, apart)


def scaled_panels(x: np.ndarray, up: np.ndarray, in_digits: bool) -> tuple[np.ndarray, np.ndarray]:
    """rne(x[t, k] up[t]) as a right operand with terms t, and its squares; x [T, K] float32, up [T] float64.

    int32 [K / COLUMNS, T, COLUMNS]; or of digits int32 [K / digits.COLUMNS, DIGITS, T / 2, digits.COLUMNS].
    """
    (terms, columns), flat = x.shape, x.reshape(-1)
    count = -(-columns // COLUMNS)
    tiles = -(-columns // digits.COLUMNS)
    size = tiles * DIGITS * ((terms + 1) // 2) * digits.COLUMNS if in_digits else count * terms * COLUMNS
    panels, squares = np.empty(size, np.int32), np.empty(count)
    fill = _scaled_digits if in_digits else _scaled_panels
    in_parts(lambda i, j: fill(flat, columns, up, i, j, panels, squares), count, 0.5 * COLUMNS * terms)
    return panels, squares


@kernel_part
def scaled_block(x, columns, up, block, out):  # type: ignore[no-untyped-def]
    """rne(x[t, n] up[t]) as a block of a left operand with terms t; flat x [T, columns], up [T]. Returns `squares`."""
    terms, start = up.size, block * ROWS
    height = min(ROWS, columns - start)
    if height == ROWS:
        _block_of_terms(x.ctypes.data + 4 * start, 4 * columns, up.ctypes.data, out.ctypes.data, terms)
        return squares_of_block(out, terms)
    for t in range(terms):
        row, target = x[t * columns + start : t * columns + start + height], out[t * ROWS : (t + 1) * ROWS]
        for c in range(height):
            target[c] = np.rint(np.float64(row[c]) * up[t])
        for c in range(height, ROWS):
            target[c] = 0.0
    return squares_of_block(out, terms)
