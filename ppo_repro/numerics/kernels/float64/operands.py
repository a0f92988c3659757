"""Operands of products in float64: matrices on their grids, in the order in which the inner loop reads them.

Left operands lie in blocks of ROWS rows, float64 [terms, ROWS] each; right operands in panels of COLUMNS columns of the
result, int32 [terms, COLUMNS] each. What pads the last block or panel is 0. The `squares` of a block or panel bound
its sums: of the sums of squares of its rows, or columns, over SQUARED terms counted from the first, the largest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ppo_repro.numerics.arithmetic.contraction import most_outliers
from ppo_repro.numerics.arithmetic.grid import MIN_EXPONENT, ROOM, WEIGHT_BITS, WEIGHT_GAP
from ppo_repro.numerics.kernels.core.compile import inline, kernel, kernel_part
from ppo_repro.numerics.kernels.core.pool import in_parts, results_of_parts
from ppo_repro.numerics.kernels.core.rows import fits, grid_exponent
from ppo_repro.numerics.kernels.core.scalar import (
    MAGNITUDE32,
    exponent32,
    magnitude_bits,
    pow2_32,
    pow2_64,
)
from ppo_repro.numerics.kernels.float64.tiles import COLUMNS, ROWS, SQUARED
from ppo_repro.numerics.kernels.float64.vectors import (
    LANES,
    columns_on_grids,
    large_numbers_at,
    largest_bits_at,
    largest_square,
    rows_on_grids,
)

_ROOM, _ONE = np.float32(ROOM), np.float32(1.0)
_LOOKED_AT = 16  # groups of LANES numbers in which the large ones are counted first
_panel_of_rows = rows_on_grids(True, COLUMNS)
_panel_of_columns = columns_on_grids(COLUMNS)
_square_of_block, _square_of_panel = largest_square(False, ROWS), largest_square(True, COLUMNS)


@dataclass(frozen=True)
class Weight:
    """Weights on grids of 23 bits, without their outliers: `panels` of a whole matrix, or none, see `pack_columns`."""

    panels: np.ndarray  # int32 [N / COLUMNS, K, COLUMNS]
    squares: np.ndarray  # float64 [N / COLUMNS], of panels
    exponents: np.ndarray  # int64 [N] of the grids
    outliers: np.ndarray  # bool [N], rows that have some
    finite: bool


def _count(size: int, of: int) -> int:
    return -(-size // of)


@inline
def on_grid(x, room, limit, up):  # type: ignore[no-untyped-def]
    """rne(x up), but 0 for an outlier."""
    return np.rint(np.float64(x) * up) if np.abs(x * room) < limit else 0.0


@kernel_part
def squares_of_block(block, terms):  # type: ignore[no-untyped-def]
    """The `squares` of flat float64 [terms, ROWS]."""
    largest = 0.0
    for start in range(0, terms, SQUARED):
        address = block.ctypes.data + 8 * ROWS * start
        largest = max(largest, _square_of_block(address, min(SQUARED, terms - start)))
    return largest


@kernel_part
def squares_of_panel(panel, terms):  # type: ignore[no-untyped-def]
    """The `squares` of flat int32 [terms, COLUMNS]."""
    largest = 0.0
    for start in range(0, terms, SQUARED):
        address = panel.ctypes.data + 4 * COLUMNS * start
        largest = max(largest, _square_of_panel(address, min(SQUARED, terms - start)))
    return largest


@inline
def grid_without_outliers(row, terms, largest, room, gap, most):  # type: ignore[no-untyped-def]
    """The exponent of the grid of the row at an address as far as a few numbers tell, and whether they do.

    They do where so many of them are large that the row has no outliers, which is usual.
    """
    e = exponent32(magnitude_bits(np.int32(largest).view(np.float32) * room))
    if e - gap < MIN_EXPONENT:
        return e, True
    return e, large_numbers_at(row, min(terms // LANES, _LOOKED_AT), room, pow2_32(e - gap)) > most


@kernel
def _fill_weight(w, terms, gap, most, bits, first, last, panels, squares, exponents, outliers):  # type: ignore[no-untyped-def]
    finite, rows, room = True, exponents.size, _ROOM
    ups, limits = np.zeros(COLUMNS), np.zeros(COLUMNS, np.float32)
    for panel in range(first, last):
        width = min(COLUMNS, rows - panel * COLUMNS)
        ups[:], limits[:] = 0.0, _ONE
        for i in range(width):
            r = panel * COLUMNS + i
            largest = largest_bits_at(w.ctypes.data + 4 * r * terms, terms)
            if not fits(largest, room):
                finite = False
                continue
            e, has_none = grid_without_outliers(w.ctypes.data + 4 * r * terms, terms, largest, room, gap, most)
            if not has_none:
                e, outliers[r] = grid_exponent(w[r * terms : r * terms + terms], room, gap, most)
            exponents[r], ups[i] = e, pow2_64(bits - e)
            limits[i] = pow2_32(e) if e < 128 else np.float32(np.inf)
        out = panels[panel * terms * COLUMNS : (panel + 1) * terms * COLUMNS]
        for group in range(0, COLUMNS, LANES):
            done = 0
            if group + LANES <= width:
                done = terms // LANES * LANES
                source, target = w.ctypes.data + 4 * (panel * COLUMNS + group) * terms, out.ctypes.data + 4 * group
                laws = limits.ctypes.data + 4 * group, ups.ctypes.data + 8 * group
                _panel_of_rows(source, 4 * terms, room, *laws, target, done)
            for i in range(group, group + LANES):
                up, limit = ups[i], limits[i]
                at = (panel * COLUMNS + min(i, width - 1)) * terms
                for k in range(done, terms):
                    out[k * COLUMNS + i] = np.int32(on_grid(w[at + k], room, limit, up))
        squares[panel] = squares_of_panel(out, terms)
    return finite


def pack_weight(w: np.ndarray) -> Weight:
    """Weights w [N, K] float32, C-contiguous, for products along K."""
    rows, terms = w.shape
    count = _count(rows, COLUMNS)
    panels, squares = np.empty(count * terms * COLUMNS, np.int32), np.empty(count)
    exponents, outliers, flat = np.zeros(rows, np.int64), _none(rows), w.reshape(-1)

    def run(first: int, last: int) -> bool:
        law = WEIGHT_GAP, most_outliers(terms), WEIGHT_BITS
        return bool(_fill_weight(flat, terms, *law, first, last, panels, squares, exponents, outliers))

    finite = results_of_parts(run, count, 0.5 * COLUMNS * terms)
    return Weight(panels, squares, exponents, outliers, all(finite))


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
    return Weight(np.empty(0, np.int32), np.empty(0), exponents, outliers, all(finite))


@kernel_part
def pack_columns(w, columns, panel, first, last, exponents, bits, out):  # type: ignore[no-untyped-def]
    """Terms first..last-1 of a panel of flat w [.., columns] along its columns; out int32 [last - first, COLUMNS]."""
    start, room = panel * COLUMNS, _ROOM
    width = min(COLUMNS, columns - start)
    ups, limits = np.zeros(COLUMNS), np.ones(COLUMNS, np.float32)
    for c in range(width):
        e = exponents[start + c]
        ups[c], limits[c] = pow2_64(bits - e), pow2_32(e) if e < 128 else np.float32(np.inf)
    if width == COLUMNS:
        source = w.ctypes.data + 4 * (first * columns + start)
        laws = limits.ctypes.data, ups.ctypes.data
        _panel_of_columns(source, 4 * columns, room, laws[0], laws[1], out.ctypes.data, last - first)
    # not left before: what is no longer used is freed, and addresses do not count as a use
    for t in range(0 if width < COLUMNS else last - first, last - first):
        row = w[(first + t) * columns + start : (first + t) * columns + start + width]
        target = out[t * COLUMNS : t * COLUMNS + COLUMNS]
        for c in range(width):
            target[c] = np.int32(on_grid(row[c], room, limits[c], ups[c]))
        for c in range(width, COLUMNS):
            target[c] = 0


@kernel
def _fill_transposed(w, terms, columns, exponents, bits, first, last, panels, squares):  # type: ignore[no-untyped-def]
    for panel in range(first, last):
        out = panels[panel * terms * COLUMNS : (panel + 1) * terms * COLUMNS]
        pack_columns(w, columns, panel, np.int64(0), terms, exponents, bits, out)
        squares[panel] = squares_of_panel(out, terms)


def pack_transposed(w: np.ndarray, grids: Weight) -> Weight:
    """The result of `column_grids` for w [N, K], with panels."""
    (terms, columns), flat = w.shape, w.reshape(-1)
    count = _count(columns, COLUMNS)
    panels, squares = np.empty(count * terms * COLUMNS, np.int32), np.empty(count)
    arguments = flat, terms, columns, grids.exponents, WEIGHT_BITS
    in_parts(lambda i, j: _fill_transposed(*arguments, i, j, panels, squares), count, 0.5 * COLUMNS * terms)
    return replace(grids, panels=panels, squares=squares)
