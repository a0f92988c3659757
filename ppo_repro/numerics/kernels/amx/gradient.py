"""Integer gradients of a weight matrix on AMX: exact int64 sums over tokens.

I[n, k] += sum_t Z[t, n] X[t, k] with Z = rne(dy 2^up_t), X = rne(x 2^(p - e_t)), as in numerics/gradients.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ppo_repro.numerics.kernels.amx.operands import MAX_TERMS, SIDE_BY_SIDE, digits_for
from ppo_repro.numerics.kernels.amx.tiles import (
    add_integers,
    clear,
    configuration,
    configure,
    expect,
    multiply,
    release,
    save,
)
from ppo_repro.numerics.kernels.core.compile import kernel
from ppo_repro.numerics.kernels.core.memory import LINE, align_to_line, empty_bytes
from ppo_repro.numerics.kernels.core.pool import in_parts
from ppo_repro.numerics.kernels.core.vectors import TILE, column_quantiser, transpose_tile

# |d0 + 256 d1 + 65536 d2| <= 8355711: three digits hold integers up to 2^22, not 2^23
THREE_DIGIT_BITS = 22

_to_words = column_quantiser((2, 3, 4), False)
_PALETTE = configuration(16)
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126


@kernel
def _pack(x, rows, columns, digits, is_a, scales, first, last, tiles):  # type: ignore[no-untyped-def]
    """Column blocks first..last-1 of flat x [T, F] as A or B tiles, contraction over T; scales [T padded to 4, 2]."""
    blocks = (rows + 63) >> 6
    size = digits * TILE
    source, target, s0 = x.ctypes.data, tiles.ctypes.data, scales.ctypes.data
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
                            padded[j * 16 + c] = x[(row + j) * columns + start + c] if inside else np.float32(0)
                    address, stride = padded.ctypes.data, 64
                tile = target + (column * blocks + (group >> 4)) * size
                _to_words(digits, address, stride, s0 + row * 8, tile + (group & 15) * 64)
    if is_a:
        # terms beyond the last row are 0 here, so B need not be initialised there
        written = ((rows + 3) >> 2) - (blocks - 1) * 16
        for column in range(first, last):
            for s in range(digits):
                tile = (column * blocks + blocks - 1) * size + s * TILE
                tiles[tile + written * 64 : tile + TILE] = 0
            for tile_index in range(blocks * digits):
                transpose_tile(target + (column * blocks * digits + tile_index) * TILE)


@kernel
def _accumulate(  # type: ignore[no-untyped-def]
    a, b, blocks, a_digits, b_digits, palette, fresh, first, last, rows, columns, sums
):
    """sums += A B, or = A B if `fresh`, for row blocks first..last-1 of flat int64 sums [rows, columns]."""
    scratch, short = align_to_line(np.empty(12 * TILE + LINE, np.int8)), np.zeros(16, np.int64)
    a0, b0, y0, s0 = a.ctypes.data, b.ctypes.data, sums.ctypes.data, scratch.ctypes.data
    a_size, b_size, kind, stride = a_digits * TILE, b_digits * TILE, a_digits * 10 + b_digits, columns * 8
    # as many row blocks at a time as stay in the second-level cache while all columns are multiplied
    step, mask = max(1, (1 << 20) // (blocks * a_size)), 0 if fresh else -1
    # a tile's rows are added while the next tile is multiplied: tiles and vectors use different ports of the core
    share, waiting, left, saved, free = (15 + blocks) // blocks, y0, 0, s0, s0 + 6 * TILE
    configure(palette.ctypes.data)
    for start in range(first, last, step):
        for k in range((columns + 15) >> 4):
            width = min(16, columns - k * 16)
            for n in range(start, min(last, start + step)):
                pa, pb, offset = a0 + n * blocks * a_size, b0 + k * blocks * b_size, n * 16 * columns + k * 16
                height = min(16, rows - n * 16)
                for r in range(height):
                    expect(y0 + offset * 8 + r * stride)
                clear()
                row = 0
                for _ in range(blocks):
                    multiply(kind, pa, pb)
                    pa += a_size
                    pb += b_size
                    for r in range(row, min(left, row + share)):
                        add_integers(kind, saved + r * 64, waiting + r * stride, mask)
                    row += share
                save(free)
                saved, free, waiting, left = free, saved, y0 + offset * 8, height
                if width < 16:
                    left = 0
                    for r in range(height):
                        short[:] = 0
                        add_integers(kind, saved + r * 64, short.ctypes.data, mask)
                        for c in range(width):
                            sums[offset + r * columns + c] = (sums[offset + r * columns + c] & mask) + short[c]
    for r in range(left):
        add_integers(kind, saved + r * 64, waiting + r * stride, mask)
    release()


@kernel
def _two_factors(scales, out):  # type: ignore[no-untyped-def]
    """float32 out [T, 2] whose products are the powers of two `scales`; products too small for float32 become 0."""
    for t in range(scales.size):
        first = min(max(scales[t], _SMALLEST), _LARGEST)
        out[t, 0], out[t, 1] = np.float32(first), np.float32(scales[t] / first)


def _packed(x: np.ndarray, digits: int, is_a: bool, scales: np.ndarray) -> np.ndarray:
    rows, columns = x.shape
    blocks = -(-columns // 16)
    tiles = empty_bytes(blocks * -(-rows // 64) * digits * TILE)
    padded = np.zeros((-(-rows // 4) * 4, 2), np.float32)
    _two_factors(scales, padded[:rows])
    flat = x.reshape(-1)
    in_parts(lambda i, j: _pack(flat, rows, columns, digits, is_a, padded, i, j, tiles), blocks, 16.0 * rows)
    return tiles


@dataclass(frozen=True)
class PackedInputs:
    """The inputs of a layer as B operands, `MAX_TERMS` tokens in each."""

    tiles: tuple[np.ndarray, ...]
    digits: int


def pack_inputs(x: np.ndarray, x_up: np.ndarray, x_bits: int) -> PackedInputs:
    """rne(x[t, k] x_up[t]), at most 2^x_bits <= 2^20; x [T, K] float32, x_up [T] float64, C-contiguous."""
    digits = digits_for(x_bits)
    chunks = [slice(start, start + MAX_TERMS) for start in range(0, len(x), MAX_TERMS)]
    return PackedInputs(tuple(_packed(x[chunk], digits, False, x_up[chunk]) for chunk in chunks), digits)


def accumulate(grad: np.ndarray, up: np.ndarray, bits: int, x: PackedInputs, sums: np.ndarray, fresh: bool) -> None:
    """sums[n, k] += sum_t rne(grad[t, n] up[t]) x[t, k], exactly; `fresh` sums are overwritten.

    grad [T, N] float32, up [T] float64, sums [N, K] int64, all C-contiguous. The integers of grad are at most
    2^bits <= 2^26 in magnitude.
    """
    a_digits, b_digits = 3 if bits <= THREE_DIGIT_BITS else 4, x.digits
    for chunk, b in enumerate(x.tiles):
        tokens = slice(chunk * MAX_TERMS, (chunk + 1) * MAX_TERMS)
        a = _packed(grad[tokens], a_digits, True, up[tokens])
        blocks, (n, k), flat = -(-len(grad[tokens]) // 64), sums.shape, sums.reshape(-1)
        overwrite = fresh and chunk == 0
        in_parts(
            lambda i, j: _accumulate(a, b, blocks, a_digits, b_digits, _PALETTE, overwrite, i, j, n, k, flat),  # noqa: B023
            -(-n // 16),
            -(-k // 16) * (blocks * 6.0 * a_digits * b_digits + 200.0),
        )
