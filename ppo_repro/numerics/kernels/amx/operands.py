"""Operands of products on AMX: float32 matrices on their grids, as tiles of 8-bit digits.

An operand is packed in blocks of 16 rows and 64 terms, one tile for each digit. A tiles hold 16 rows of 64 bytes. B
tiles hold 4 terms of one output column in each 32-bit word, and 16 columns in each row of the tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ppo_repro.numerics.kernels.core.compile import kernel
from ppo_repro.numerics.kernels.core.memory import empty_bytes, zero_bytes
from ppo_repro.numerics.kernels.core.pool import in_parts, results_of_parts
from ppo_repro.numerics.kernels.core.rows import NOTHING, largest_bits
from ppo_repro.numerics.kernels.core.scalar import INFINITY_BITS, exponent32, pow2_32, pow2_64
from ppo_repro.numerics.kernels.core.vectors import TILE, column_quantiser, row_quantiser

# |digit product| <= 2^14 and at most 3 of them share a level: sums of this many terms stay inside int32
MAX_TERMS = 32768
# column blocks read at a time: a row of one block is a single cache line, far from the next row's
SIDE_BY_SIDE = 8

_to_a, _to_b, _columns_to_b = row_quantiser(False), row_quantiser(True), column_quantiser((2, 3), True)


@kernel
def fill_tiles(x, bits, terms, p, digits, first, last, tiles, scales, exponents):  # type: ignore[no-untyped-def]
    """Rows first..last-1 of flat x [M, K] into A tiles, with scales 2^(e - p). Returns whether they are finite."""
    blocks = (terms + 63) >> 6
    size = digits * TILE
    source, target = x.ctypes.data, tiles.ctypes.data
    padded = np.zeros(16, np.float32)
    finite = True
    for r in range(first, last):
        largest = largest_bits(bits[r * terms : r * terms + terms])
        if largest >= INFINITY_BITS:
            finite = False
            continue
        e = exponent32(largest)
        scale = pow2_32(p - e)
        scales[r], exponents[r] = pow2_64(e - p), NOTHING if largest == 0 else e
        row = target + (r >> 4) * blocks * size + (r & 15) * 64
        for group in range(blocks * 4):
            start = group * 16
            if start >= terms:
                break
            address = source + (r * terms + start) * 4
            if start + 16 > terms:
                for c in range(16):
                    padded[c] = x[r * terms + start + c] if start + c < terms else np.float32(0)
                address = padded.ctypes.data
            tile = row + (group >> 2) * size + (group & 3) * 16
            _to_a(digits, address, scale, tile)
    return finite


@kernel
def _pack_rows(w, bits, rows, terms, p, digits, first, last, tiles, scales):  # type: ignore[no-untyped-def]
    """Row blocks first..last-1 of flat w [N, K] as output columns of B tiles, contraction along K."""
    blocks = (terms + 63) >> 6
    size = digits * TILE
    source, target = w.ctypes.data, tiles.ctypes.data
    padded, up = np.zeros(16, np.float32), np.zeros(16, np.float32)
    finite = True
    for block in range(first, last):
        height = min(16, rows - block * 16)
        for r in range(height):
            start = (block * 16 + r) * terms
            largest = largest_bits(bits[start : start + terms])
            finite &= largest < INFINITY_BITS
            e = exponent32(largest)
            up[r], scales[block * 16 + r] = pow2_32(p - e), pow2_64(e - p)
        if not finite:
            break
        for group in range((terms + 15) >> 4):  # all rows of a tile while the tile is in the first-level cache
            start, tile = group * 16, target + (block * blocks + (group >> 2)) * size + (group & 3) * 256
            for r in range(height):
                address = source + ((block * 16 + r) * terms + start) * 4
                if start + 16 > terms:
                    for c in range(16):
                        inside = start + c < terms
                        padded[c] = w[(block * 16 + r) * terms + start + c] if inside else np.float32(0)
                    address = padded.ctypes.data
                _to_b(digits, address, up[r], tile + r * 4)
    return finite


@kernel
def _column_scales(bits, rows, columns, p, up, down):  # type: ignore[no-untyped-def]
    """2^(p - e) and 2^(e - p) of each column of a flat matrix. Returns whether it is finite."""
    largest = np.zeros(columns, np.int32)
    for r in range(rows):
        row = bits[r * columns : r * columns + columns]
        for c in range(columns):
            largest[c] = max(largest[c], row[c] & np.int32(0x7FFFFFFF))
    finite = True
    for c in range(columns):
        finite &= largest[c] < INFINITY_BITS
        e = exponent32(largest[c])
        up[c], down[c] = pow2_32(p - e), pow2_64(e - p)
    return finite


@kernel
def _pack_columns(w, rows, columns, digits, up, first, last, tiles):  # type: ignore[no-untyped-def]
    """Column blocks first..last-1 of flat w [N, K] as output columns of B tiles, contraction along N."""
    blocks = (rows + 63) >> 6
    size = digits * TILE
    source, target, scales = w.ctypes.data, tiles.ctypes.data, up.ctypes.data
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
                tile = target + (column * blocks + (group >> 4)) * size + (group & 15) * 64
                _columns_to_b(digits, address, stride, scales + start * 4, tile)


@dataclass(frozen=True)
class PackedWeight:
    """The B operand of a contraction: `terms` terms, `columns` outputs, grids of `p` bits."""

    tiles: np.ndarray
    scales: np.ndarray
    terms: int
    columns: int
    p: int
    digits: int
    finite: bool


def digits_for(p: int) -> int:
    """Digits of integers up to 2^p: two reach 32639, three 8355711."""
    return 2 if p <= 14 else 3


def _flat(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    flat = x.reshape(-1)
    return flat, flat.view(np.int32)


def _no_operand(terms: int, columns: int, digits: int) -> tuple[np.ndarray, np.ndarray]:
    width = -(-columns // 16)
    make = zero_bytes if terms % 64 or columns % 16 else empty_bytes  # padding must be 0
    return make(width * -(-terms // 64) * digits * TILE), np.zeros(width * 16)


def pack(w: np.ndarray, p: int, along_rows: bool, outdated: PackedWeight | None = None) -> PackedWeight:
    """Pack float32 w [N, K] C-contiguous: contraction along K (`along_rows`) or along N.

    Overwrites the memory of `outdated` if that was packed the same way from a matrix of the same shape.
    """
    rows, columns = w.shape
    terms, outputs = (columns, rows) if along_rows else (rows, columns)
    if terms > MAX_TERMS:
        raise ValueError(f"{terms} terms: int32 accumulators hold sums of {MAX_TERMS}")
    digits = digits_for(p)
    if outdated is not None and (outdated.terms, outdated.columns, outdated.digits) == (terms, outputs, digits):
        tiles, scales = outdated.tiles, outdated.scales
    else:
        tiles, scales = _no_operand(terms, outputs, digits)
    flat, bits = _flat(w)
    if along_rows:

        def run(first: int, last: int) -> bool:
            return bool(_pack_rows(flat, bits, rows, terms, p, digits, first, last, tiles, scales))

        finite = all(results_of_parts(run, -(-rows // 16), 16.0 * terms))
    else:
        up = np.zeros(len(scales), np.float32)
        finite = bool(_column_scales(bits, rows, columns, p, up, scales))
        blocks = -(-columns // 16)
        in_parts(lambda i, j: _pack_columns(flat, rows, columns, digits, up, i, j, tiles), blocks, 16.0 * rows)
    return PackedWeight(tiles, scales, terms, outputs, p, digits, finite)


@dataclass(frozen=True)
class PackedRows:
    """The A operand of contractions: inputs [rows, terms] on grids of `p` bits."""

    tiles: np.ndarray
    scales: np.ndarray
    exponents: np.ndarray  # int64 [rows], see `rows.row_exponents`
    rows: int
    terms: int
    p: int
    finite: bool


def quantise_rows(x: np.ndarray, p: int) -> PackedRows:
    """Put the rows of float32 x [M, terms], C-contiguous, on grids of p bits."""
    rows, terms = x.shape
    digits = digits_for(p)
    blocks, row_blocks = -(-terms // 64), -(-rows // 16)
    a, scales = empty_bytes(row_blocks * blocks * digits * TILE), np.empty(row_blocks * 16)
    exponents = np.empty(rows, np.int64)
    flat, bits = _flat(x)

    def run(first: int, last: int) -> bool:
        return bool(fill_tiles(flat, bits, terms, p, digits, first, last, a, scales, exponents))

    finite = results_of_parts(run, rows, 0.3 * terms)
    return PackedRows(a, scales, exponents, rows, terms, p, all(finite))
