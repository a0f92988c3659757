"""Operands of products on AMX: float32 matrices on their grids, as tiles of 8-bit digits.

An operand is packed in blocks of 16 rows and 64 terms, one tile for each digit. A tiles hold 16 rows of 64 bytes. B
tiles hold 4 terms of one output column in each 32-bit word, and 16 columns in each row of the tile. The outliers of a
row (`arithmetic.contraction`) are 0 in the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ppo_repro.numerics.arithmetic.contraction import most_outliers
from ppo_repro.numerics.arithmetic.grid import INPUT_BITS, INPUT_GAP, ROOM, WEIGHT_BITS, WEIGHT_GAP
from ppo_repro.numerics.kernels.amx.tiles import A_DIGITS, A_SIZE, B_DIGITS, B_SIZE
from ppo_repro.numerics.kernels.core.compile import inline, kernel
from ppo_repro.numerics.kernels.core.memory import empty_bytes, zero_bytes
from ppo_repro.numerics.kernels.core.pool import in_parts, results_of_parts
from ppo_repro.numerics.kernels.core.rows import NOTHING, fits, grid_exponent, largest_bits
from ppo_repro.numerics.kernels.core.scalar import INFINITY_BITS, exponent32, magnitude_bits, pow2_32, pow2_64
from ppo_repro.numerics.kernels.core.vectors import column_quantiser, row_quantiser

# Integers of 26 and 23 bits: a sum of so many products stays inside int64, and those of its digits inside int32.
MAX_TERMS = 1 << 14
# column blocks read at a time: a row of one block is a single cache line, far from the next row's
SIDE_BY_SIDE = 8

_to_a, _to_b = row_quantiser(A_DIGITS, False), row_quantiser(B_DIGITS, True)
_columns_to_b = column_quantiser(B_DIGITS)
_ONE, _ROOM, _NO_LIMIT = np.float32(1), np.float32(ROOM), np.float32(np.nan)


def _least_over(room: np.float32) -> np.float32:
    """The smallest float32 x with fl32(x room) >= 1; for other powers of two it is that many times as large."""
    x = np.float32(1) / room
    while x * room >= 1:
        x = np.nextafter(x, np.float32(0))
    while x * room < 1:
        x = np.nextafter(x, np.float32(2))
    return x


_LEAST_OVER = _least_over(_ROOM)


@inline
def _limit(e, has_outliers, least):  # type: ignore[no-untyped-def]
    """The magnitude from which on numbers are outliers, given the grid's exponent."""
    return pow2_32(e) * least if has_outliers else _NO_LIMIT


@kernel
def fill_tiles(x, terms, most, first, last, tiles, scales, exponents, outliers):  # type: ignore[no-untyped-def]
    """Rows first..last-1 of flat x [M, K] into A tiles, and the scales of their grids. Returns whether all are finite.

    Also sets `exponents` as `PackedRows` has them, and which rows have `outliers`, at most `most` each.
    """
    blocks = (terms + 63) >> 6
    source, target, bits = x.ctypes.data, tiles.ctypes.data, x.view(np.int32)
    padded = np.zeros(16, np.float32)
    finite = True
    for r in range(first, last):
        largest = largest_bits(bits[r * terms : r * terms + terms])
        if largest >= INFINITY_BITS:
            finite = False
            continue
        e, outliers[r] = grid_exponent(x[r * terms : r * terms + terms], _ONE, INPUT_GAP, most)
        scale, limit = pow2_32(INPUT_BITS - e), _limit(e, outliers[r], _ONE)
        scales[r], exponents[r] = pow2_64(e - INPUT_BITS), NOTHING if largest == 0 else exponent32(largest)
        row = target + (r >> 4) * blocks * A_SIZE + (r & 15) * 64
        for group in range(blocks * 4):
            start = group * 16
            if start >= terms:
                break
            address = source + (r * terms + start) * 4
            if start + 16 > terms:
                for c in range(16):
                    padded[c] = x[r * terms + start + c] if start + c < terms else np.float32(0)
                address = padded.ctypes.data
            _to_a(address, scale, limit, row + (group >> 2) * A_SIZE + (group & 3) * 16)
    return finite


@kernel
def _pack_rows(w, rows, terms, most, first, last, tiles, scales, outliers):  # type: ignore[no-untyped-def]
    """Row blocks first..last-1 of flat w [N, K] as output columns of B tiles, contraction along K."""
    blocks = (terms + 63) >> 6
    source, target, bits = w.ctypes.data, tiles.ctypes.data, w.view(np.int32)
    padded, up, limits = np.zeros(16, np.float32), np.zeros(16, np.float32), np.zeros(16, np.float32)
    for block in range(first, last):
        height = min(16, rows - block * 16)
        for r in range(height):
            row, start = block * 16 + r, (block * 16 + r) * terms
            if not fits(largest_bits(bits[start : start + terms]), _ROOM):
                return False
            e, outliers[row] = grid_exponent(w[start : start + terms], _ROOM, WEIGHT_GAP, most)
            up[r], scales[row] = pow2_32(WEIGHT_BITS - e), pow2_64(e - WEIGHT_BITS)
            limits[r] = _limit(e, outliers[row], _LEAST_OVER)
        for group in range((terms + 15) >> 4):  # all rows of a tile while the tile is in the first-level cache
            start, tile = group * 16, target + (block * blocks + (group >> 2)) * B_SIZE + (group & 3) * 256
            for r in range(height):
                address = source + ((block * 16 + r) * terms + start) * 4
                if start + 16 > terms:
                    for c in range(16):
                        inside = start + c < terms
                        padded[c] = w[(block * 16 + r) * terms + start + c] if inside else np.float32(0)
                    address = padded.ctypes.data
                _to_b(address, up[r], limits[r], tile + r * 4)
    return True


@kernel
def _column_grids(w, rows, columns, most, first, last, up, limits, scales, outliers):  # type: ignore[no-untyped-def]
    """Columns first..last-1 of flat w [rows, columns] as rows of `grid_exponent`. Returns whether they are finite."""
    largest, bits = np.zeros(last - first, np.int32), w.view(np.int32)
    for r in range(rows):
        row = bits[r * columns + first : r * columns + last]
        for c in range(row.size):
            largest[c] = max(largest[c], row[c] & np.int32(0x7FFFFFFF))
    least, counts = np.zeros(last - first, np.float32), np.zeros(last - first, np.int32)
    for c in range(largest.size):
        if not fits(largest[c], _ROOM):
            return False
        top = exponent32(magnitude_bits(np.int32(largest[c]).view(np.float32) * _ROOM))
        up[first + c], scales[first + c] = pow2_32(WEIGHT_BITS - top), pow2_64(top - WEIGHT_BITS)
        limits[first + c], outliers[first + c] = _NO_LIMIT, False
        least[c] = pow2_32(top - WEIGHT_GAP) * _LEAST_OVER
    for r in range(rows):
        values = w[r * columns + first : r * columns + last]
        for c in range(values.size):
            counts[c] += np.int32(1) if np.abs(values[c]) >= least[c] else np.int32(0)
    for c in range(first, last):
        if counts[c - first] <= most:  # rare, so the column may be gathered
            e, outliers[c] = grid_exponent(w[c::columns].copy(), _ROOM, WEIGHT_GAP, most)
            up[c], scales[c] = pow2_32(WEIGHT_BITS - e), pow2_64(e - WEIGHT_BITS)
            limits[c] = _limit(e, outliers[c], _LEAST_OVER)
    return True


@kernel
def _pack_columns(w, rows, columns, up, limits, first, last, tiles):  # type: ignore[no-untyped-def]
    """Column blocks first..last-1 of flat w [N, K] as output columns of B tiles, contraction along N."""
    blocks = (rows + 63) >> 6
    source, target, scales, bounds = w.ctypes.data, tiles.ctypes.data, up.ctypes.data, limits.ctypes.data
    padded = np.zeros(64, np.float32)
    for left in range(first, last, SIDE_BY_SIDE):
        for group in range((rows + 3) >> 2):
            row = group * 4
            for column in range(left, min(last, left + SIDE_BY_SIDE)):
                start = column * 16
                address, stride = source + (row * columns + start) * 4, columns * 4
                if row + 4 > rows or start + 16 > columns:
                    for j in range(4):
                        for c in range(16):
                            inside = row + j < rows and start + c < columns
                            padded[j * 16 + c] = w[(row + j) * columns + start + c] if inside else np.float32(0)
                    address, stride = padded.ctypes.data, 64
                tile = target + (column * blocks + (group >> 4)) * B_SIZE + (group & 15) * 64
                _columns_to_b(address, stride, scales + start * 4, bounds + start * 4, tile)


@dataclass(frozen=True)
class PackedWeight:
    """The B operand of a contraction: `terms` terms, `columns` outputs."""

    tiles: np.ndarray
    scales: np.ndarray  # float64, of the columns' grids; padded to a multiple of 16
    outliers: np.ndarray  # bool [columns], which columns have outliers
    terms: int
    columns: int
    finite: bool


def _no_operand(terms: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    width = -(-columns // 16)
    make = zero_bytes if terms % 64 or columns % 16 else empty_bytes  # padding must be 0
    return make(width * -(-terms // 64) * B_SIZE), np.zeros(width * 16)


def pack(w: np.ndarray, along_rows: bool, outdated: PackedWeight | None = None) -> PackedWeight:
    """Pack float32 w [N, K] C-contiguous: contraction along K (`along_rows`) or along N.

    Overwrites the memory of `outdated` if that was packed the same way from a matrix of the same shape.
    """
    rows, columns = w.shape
    terms, outputs = (columns, rows) if along_rows else (rows, columns)
    if terms > MAX_TERMS:
        raise ValueError(f"{terms} terms: integers of 64 bits hold sums of {MAX_TERMS}")
    if outdated is not None and (outdated.terms, outdated.columns) == (terms, outputs):
        tiles, scales = outdated.tiles, outdated.scales
    else:
        tiles, scales = _no_operand(terms, outputs)
    flat, outliers, most = w.reshape(-1), np.zeros(outputs, np.bool_), most_outliers(terms)
    blocks = -(-outputs // 16)
    if along_rows:

        def run(first: int, last: int) -> bool:
            return bool(_pack_rows(flat, rows, terms, most, first, last, tiles, scales, outliers))

        finite = all(results_of_parts(run, blocks, 16.0 * terms))
    else:
        finite = _packed_columns(flat, rows, columns, tiles, scales, outliers)
    return PackedWeight(tiles, scales, outliers, terms, outputs, finite)


def _packed_columns(
    flat: np.ndarray, rows: int, columns: int, tiles: np.ndarray, scales: np.ndarray, outliers: np.ndarray
) -> bool:
    """Fill tiles, scales and outliers for a contraction along N; returns whether the weight is finite."""
    up, limits, most = np.zeros(len(scales), np.float32), np.zeros(len(scales), np.float32), most_outliers(rows)

    def grids(first: int, last: int) -> bool:
        arrays = up, limits, scales, outliers
        return bool(_column_grids(flat, rows, columns, most, first * 16, min(last * 16, columns), *arrays))

    blocks = -(-columns // 16)
    if not all(results_of_parts(grids, blocks, 3.0 * rows)):
        return False
    in_parts(lambda i, j: _pack_columns(flat, rows, columns, up, limits, i, j, tiles), blocks, 16.0 * rows)
    return True


@dataclass(frozen=True)
class PackedRows:
    """The A operand of contractions: inputs [rows, terms]."""

    tiles: np.ndarray
    scales: np.ndarray  # float64, of the rows' grids; padded to a multiple of 16
    exponents: np.ndarray  # int64 [rows] of the largest numbers, see `rows.row_exponents`
    outliers: np.ndarray  # bool [rows], which rows have outliers
    rows: int
    terms: int
    finite: bool


def quantise_rows(x: np.ndarray) -> PackedRows:
    """Put the rows of float32 x [M, terms], C-contiguous, on their grids."""
    rows, terms = x.shape
    blocks, row_blocks, most = -(-terms // 64), -(-rows // 16), most_outliers(terms)
    a, scales = empty_bytes(row_blocks * blocks * A_SIZE), np.empty(row_blocks * 16)
    exponents, outliers, flat = np.empty(rows, np.int64), np.zeros(rows, np.bool_), x.reshape(-1)

    def run(first: int, last: int) -> bool:
        return bool(fill_tiles(flat, terms, most, first, last, a, scales, exponents, outliers))

    finite = results_of_parts(run, rows, 0.4 * terms)
    return PackedRows(a, scales, exponents, outliers, rows, terms, all(finite))
