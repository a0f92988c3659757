"""Operands of products in float64: matrices on their grids, in the order in which the inner loop reads them.

Left operands lie in blocks of ROWS rows, float64 [terms, ROWS] each; right operands in panels of COLUMNS columns of the
result, int32 [terms, COLUMNS] each. What pads the last block or panel is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ppo_repro.numerics.arithmetic.contraction import most_outliers
from ppo_repro.numerics.arithmetic.grid import INPUT_BITS, INPUT_GAP, ROOM, WEIGHT_BITS, WEIGHT_GAP
from ppo_repro.numerics.kernels.core.compile import inline, kernel
from ppo_repro.numerics.kernels.core.pool import in_parts, results_of_parts
from ppo_repro.numerics.kernels.core.rows import NOTHING, fits, grid_exponent, largest_bits
from ppo_repro.numerics.kernels.core.scalar import (
    INFINITY_BITS,
    MAGNITUDE32,
    exponent32,
    magnitude_bits,
    pow2_32,
    pow2_64,
)
from ppo_repro.numerics.kernels.float64.tiles import COLUMNS, ROWS

_ROOM, _ONE = np.float32(ROOM), np.float32(1.0)
_ACROSS = 64  # terms of several rows at a time: what they are written to stays in the first-level cache


@dataclass(frozen=True)
class Inputs:
    """Inputs [M, K] on grids of 26 bits, without their outliers."""

    blocks: np.ndarray  # float64 [M / ROWS, K, ROWS]
    scales: np.ndarray  # float64 [M]
    exponents: np.ndarray  # int64 [M] of the largest number of each row, see `rows.row_exponents`
    outliers: np.ndarray  # bool [M], rows that have some
    finite: bool


@dataclass(frozen=True)
class Weight:
    """Weights on grids of 23 bits, without their outliers: `panels` of a whole matrix, or none, see `pack_columns`."""

    panels: np.ndarray  # int32 [N / COLUMNS, K, COLUMNS]
    exponents: np.ndarray  # int64 [N] of the grids
    outliers: np.ndarray  # bool [N], rows that have some
    finite: bool


def _count(size: int, of: int) -> int:
    return -(-size // of)


@inline
def _on_grid(x, room, limit, up):  # type: ignore[no-untyped-def]
    """rne(x up), but 0 for an outlier."""
    return np.rint(np.float64(x) * up) if np.abs(x * room) < limit else 0.0


@kernel
def _fill_inputs(x, terms, gap, most, bits, first, last, blocks, scales, exponents, outliers):  # type: ignore[no-untyped-def]
    finite, one = True, _ONE
    ups, limits = np.zeros(ROWS), np.zeros(ROWS, np.float32)
    rows = scales.size
    for block in range(first, last):
        height = min(ROWS, rows - block * ROWS)
        ups[:], limits[:] = 0.0, _ONE
        for i in range(height):
            r = block * ROWS + i
            row = x[r * terms : r * terms + terms]
            largest = largest_bits(row.view(np.int32))
            if largest >= INFINITY_BITS:
                finite = False
                continue
            e, outliers[r] = grid_exponent(row, one, gap, most)
            exponents[r] = NOTHING if largest == 0 else exponent32(largest)
            scales[r], ups[i] = pow2_64(e - bits), pow2_64(bits - e)
            limits[i] = pow2_32(e) if e < 128 else np.float32(np.inf)
        out = blocks[block * terms * ROWS : (block + 1) * terms * ROWS]
        for start in range(0, terms, _ACROSS):
            stop = min(start + _ACROSS, terms)
            for i in range(ROWS):
                up, limit = ups[i], limits[i]
                at = (block * ROWS + min(i, height - 1)) * terms
                for k in range(start, stop):
                    out[k * ROWS + i] = _on_grid(x[at + k], one, limit, up)
    return finite


def quantise_inputs(x: np.ndarray) -> Inputs:
    """Inputs x [M, K] float32, C-contiguous, on their grids."""
    rows, terms = x.shape
    count = _count(rows, ROWS)
    blocks, scales, exponents = np.empty(count * terms * ROWS), np.ones(rows), np.empty(rows, np.int64)
    outliers, flat = np.zeros(rows, np.bool_), x.reshape(-1)

    def run(first: int, last: int) -> bool:
        law = INPUT_GAP, most_outliers(terms), INPUT_BITS
        return bool(_fill_inputs(flat, terms, *law, first, last, blocks, scales, exponents, outliers))

    finite = results_of_parts(run, count, 1.5 * ROWS * terms)
    return Inputs(blocks, scales, exponents, outliers, all(finite))


@kernel
def _fill_weight(w, terms, gap, most, bits, first, last, panels, exponents, outliers):  # type: ignore[no-untyped-def]
    finite, rows, room = True, exponents.size, _ROOM
    ups, limits = np.zeros(COLUMNS), np.zeros(COLUMNS, np.float32)
    for panel in range(first, last):
        width = min(COLUMNS, rows - panel * COLUMNS)
        ups[:], limits[:] = 0.0, _ONE
        for i in range(width):
            r = panel * COLUMNS + i
            row = w[r * terms : r * terms + terms]
            if not fits(largest_bits(row.view(np.int32)), room):
                finite = False
                continue
            e, outliers[r] = grid_exponent(row, room, gap, most)
            exponents[r], ups[i] = e, pow2_64(bits - e)
            limits[i] = pow2_32(e) if e < 128 else np.float32(np.inf)
        out = panels[panel * terms * COLUMNS : (panel + 1) * terms * COLUMNS]
        for start in range(0, terms, _ACROSS):
            stop = min(start + _ACROSS, terms)
            for i in range(COLUMNS):
                up, limit = ups[i], limits[i]
                at = (panel * COLUMNS + min(i, width - 1)) * terms
                for k in range(start, stop):
                    out[k * COLUMNS + i] = np.int32(_on_grid(w[at + k], room, limit, up))
    return finite


def pack_weight(w: np.ndarray) -> Weight:
    """Weights w [N, K] float32, C-contiguous, for products along K."""
    rows, terms = w.shape
    count = _count(rows, COLUMNS)
    panels, exponents, outliers = np.empty(count * terms * COLUMNS, np.int32), np.zeros(rows, np.int64), _none(rows)
    flat = w.reshape(-1)

    def run(first: int, last: int) -> bool:
        law = WEIGHT_GAP, most_outliers(terms), WEIGHT_BITS
        return bool(_fill_weight(flat, terms, *law, first, last, panels, exponents, outliers))

    finite = results_of_parts(run, count, 1.5 * COLUMNS * terms)
    return Weight(panels, exponents, outliers, all(finite))


def _none(rows: int) -> np.ndarray:
    return np.zeros(rows, np.bool_)


@kernel
def _column_grids(w, terms, columns, gap, most, first, last, exponents, outliers):  # type: ignore[no-untyped-def]
    """Grids of columns first..last-1 of flat w [terms, columns]. Returns whether they are finite."""
    width, room = last - first, _ROOM
    largest, least, counts = np.zeros(width, np.int32), np.zeros(width, np.float32), np.zeros(width, np.int64)
    for t in range(terms):
        row = w[t * columns + first : t * columns + last].view(np.int32)
        for c in range(width):
            largest[c] = max(largest[c], row[c] & MAGNITUDE32)
    for c in range(width):
        if not fits(largest[c], room):
            return False
        e = exponent32(magnitude_bits(np.int32(largest[c]).view(np.float32) * room))
        exponents[first + c] = e
        least[c] = pow2_32(max(e - gap, -126))
    for t in range(terms):
        row = w[t * columns + first : t * columns + last]
        for c in range(width):
            counts[c] += 1 if np.abs(row[c] * room) >= least[c] else 0
    column = np.empty(terms, np.float32)
    for c in range(width):
        if counts[c] <= most:
            for t in range(terms):
                column[t] = w[t * columns + first + c]
            exponents[first + c], outliers[first + c] = grid_exponent(column, room, gap, most)
    return True


def column_grids(w: np.ndarray) -> Weight:
    """The grids of weights w [N, K] float32, C-contiguous, for products along N; without panels."""
    terms, columns = w.shape
    exponents, outliers, flat = np.zeros(columns, np.int64), _none(columns), w.reshape(-1)

    def run(first: int, last: int) -> bool:
        law = WEIGHT_GAP, most_outliers(terms)
        bounds = [*range(first * COLUMNS, min(last * COLUMNS, columns), 8 * COLUMNS), min(last * COLUMNS, columns)]
        return all([_column_grids(flat, terms, columns, *law, a, z, exponents, outliers) for a, z in pairwise(bounds)])

    finite = results_of_parts(run, _count(columns, COLUMNS), 0.5 * COLUMNS * terms)
    return Weight(np.empty(0, np.int32), exponents, outliers, all(finite))


@kernel
def pack_columns(w, columns, panel, first, last, exponents, bits, out):  # type: ignore[no-untyped-def]
    """Terms first..last-1 of a panel of flat w [.., columns] along its columns; out int32 [last - first, COLUMNS]."""
    start, room = panel * COLUMNS, _ROOM
    width = min(COLUMNS, columns - start)
    ups, limits = np.zeros(COLUMNS), np.ones(COLUMNS, np.float32)
    for c in range(width):
        e = exponents[start + c]
        ups[c], limits[c] = pow2_64(bits - e), pow2_32(e) if e < 128 else np.float32(np.inf)
    for t in range(last - first):
        row = w[(first + t) * columns + start : (first + t) * columns + start + width]
        target = out[t * COLUMNS : t * COLUMNS + COLUMNS]
        for c in range(width):
            target[c] = np.int32(_on_grid(row[c], room, limits[c], ups[c]))
        for c in range(width, COLUMNS):
            target[c] = 0


@kernel
def _scaled_panels(x, columns, up, first, last, panels):  # type: ignore[no-untyped-def]
    terms = up.size
    for panel in range(first, last):
        start = panel * COLUMNS
        width = min(COLUMNS, columns - start)
        out = panels[panel * terms * COLUMNS : (panel + 1) * terms * COLUMNS]
        for t in range(terms):
            row, target = x[t * columns + start : t * columns + start + width], out[t * COLUMNS : (t + 1) * COLUMNS]
            for c in range(width):
                target[c] = np.int32(np.rint(np.float64(row[c]) * up[t]))
            for c in range(width, COLUMNS):
                target[c] = 0


def scaled_panels(x: np.ndarray, up: np.ndarray) -> np.ndarray:
    """rne(x[t, k] up[t]) as a right operand with terms t; x [T, K] float32, up [T] float64."""
    terms, columns = x.shape
    panels, flat = np.empty(_count(columns, COLUMNS) * terms * COLUMNS, np.int32), x.reshape(-1)
    work = lambda i, j: _scaled_panels(flat, columns, up, i, j, panels)  # noqa: E731
    in_parts(work, _count(columns, COLUMNS), 0.5 * COLUMNS * terms)
    return panels


@kernel
def scaled_blocks(x, columns, up, first, last, blocks):  # type: ignore[no-untyped-def]
    """rne(x[t, n] up[t]) as blocks first..last-1 of a left operand with terms t; flat x [T, columns], up [T]."""
    terms = up.size
    for block in range(first, last):
        start = block * ROWS
        height = min(ROWS, columns - start)
        out = blocks[(block - first) * terms * ROWS : (block - first + 1) * terms * ROWS]
        for t in range(terms):
            row, target = x[t * columns + start : t * columns + start + height], out[t * ROWS : (t + 1) * ROWS]
            for c in range(height):
                target[c] = np.rint(np.float64(row[c]) * up[t])
            for c in range(height, ROWS):
                target[c] = 0.0
