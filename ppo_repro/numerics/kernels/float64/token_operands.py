"""Operands of products in float64 whose terms are tokens: output gradients and inputs of layers, see `operands`."""

from __future__ import annotations

import numpy as np

from ppo_repro.numerics.kernels.core.compile import kernel, kernel_part
from ppo_repro.numerics.kernels.core.pool import in_parts
from ppo_repro.numerics.kernels.float64.operands import squares_of_block, squares_of_panel
from ppo_repro.numerics.kernels.float64.tiles import COLUMNS, ROWS
from ppo_repro.numerics.kernels.float64.vectors import terms_on_grids

_block_of_terms, _panel_of_terms = terms_on_grids(False, ROWS), terms_on_grids(True, COLUMNS)


@kernel
def _scaled_panels(x, columns, up, first, last, panels, squares):  # type: ignore[no-untyped-def]
    terms = up.size
    for panel in range(first, last):
        start = panel * COLUMNS
        width = min(COLUMNS, columns - start)
        out = panels[panel * terms * COLUMNS : (panel + 1) * terms * COLUMNS]
        if width == COLUMNS:
            _panel_of_terms(x.ctypes.data + 4 * start, 4 * columns, up.ctypes.data, out.ctypes.data, terms)
        for t in range(0 if width < COLUMNS else terms, terms):
            row, target = x[t * columns + start : t * columns + start + width], out[t * COLUMNS : (t + 1) * COLUMNS]
            for c in range(width):
                target[c] = np.int32(np.rint(np.float64(row[c]) * up[t]))
            for c in range(width, COLUMNS):
                target[c] = 0
        squares[panel] = squares_of_panel(out, terms)


def scaled_panels(x: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """rne(x[t, k] up[t]) as a right operand with terms t, and its squares; x [T, K] float32, up [T] float64."""
    (terms, columns), flat = x.shape, x.reshape(-1)
    count = -(-columns // COLUMNS)
    panels, squares = np.empty(count * terms * COLUMNS, np.int32), np.empty(count)
    work = lambda i, j: _scaled_panels(flat, columns, up, i, j, panels, squares)  # noqa: E731
    in_parts(work, count, 0.5 * COLUMNS * terms)
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
