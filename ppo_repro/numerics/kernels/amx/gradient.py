"""Integer gradients of a weight matrix on AMX: exact int64 sums over tokens.

I[n, k] += sum_t Z[t, n] X[t, k] with Z = rne(dy 2^up_t), X = rne(x 2^(p - e_t)), as in numerics/gradients.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ppo_repro.numerics.kernels.amx.operands import SIDE_BY_SIDE
from ppo_repro.numerics.kernels.amx.tiles import (
    A_DIGITS,
    A_SIZE,
    B_DIGITS,
    B_SIZE,
    SAVED,
    STATE,
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
from ppo_repro.numerics.kernels.core.vectors import TILE, scaled_row_quantiser, transpose_tile

# |digit product| <= 2^14 and three of them share a power of 256: sums over this many tokens stay inside int32
MAX_TOKENS = 1 << 15

_gradients_to_words, _inputs_to_words = scaled_row_quantiser(A_DIGITS), scaled_row_quantiser(B_DIGITS)
_PALETTE = configuration(16)
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126


@kernel
def _pack(x, rows, columns, is_a, scales, first, last, tiles):  # type: ignore[no-untyped-def]
    """Column blocks first..last-1 of flat x [T, F] as A or B tiles, contraction over T; scales [T padded to 4, 2]."""
    blocks = (rows + 63) >> 6
    digits, size = (A_DIGITS, A_SIZE) if is_a else (B_DIGITS, B_SIZE)
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
                tile = target + (column * blocks + (group >> 4)) * size + (group & 15) * 64
                if is_a:
                    _gradients_to_words(address, stride, s0 + row * 8, tile)
                else:
                    _inputs_to_words(address, stride, s0 + row * 8, tile)
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
def _accumulate(a, b, blocks, palette, fresh, first, last, rows, columns, sums):  # type: ignore[no-untyped-def]
    """sums += A B, or = A B if `fresh`, for row blocks first..last-1 of flat int64 sums [rows, columns]."""
    scratch, short = align_to_line(np.empty(2 * SAVED + STATE + LINE, np.int8)), np.zeros(16, np.int64)
    a0, b0, y0, s0 = a.ctypes.data, b.ctypes.data, sums.ctypes.data, scratch.ctypes.data
    registers, stride = s0 + 2 * SAVED, columns * 8
    # as many row blocks at a time as stay in the second-level cache while all columns are multiplied
    step, mask = max(1, (1 << 20) // (blocks * A_SIZE)), 0 if fresh else -1
    # a tile's rows are added while the next tile is multiplied: tiles and vectors use different ports of the core
    share, waiting, left, saved, free = (15 + blocks) // blocks, y0, 0, s0, s0 + SAVED
    configure(registers, palette.ctypes.data)
    for start in range(first, last, step):
        for k in range((columns + 15) >> 4):
            width = min(16, columns - k * 16)
            for n in range(start, min(last, start + step)):
                pa, pb, offset = a0 + n * blocks * A_SIZE, b0 + k * blocks * B_SIZE, n * 16 * columns + k * 16
                height = min(16, rows - n * 16)
                for r in range(height):
                    expect(y0 + offset * 8 + r * stride)
                clear(registers)
                row = 0
                for _ in range(blocks):
                    multiply(registers, pa, pb)
                    pa += A_SIZE
                    pb += B_SIZE
                    for r in range(row, min(left, row + share)):
                        add_integers(saved + r * 64, waiting + r * stride, mask)
                    row += share
                save(registers, free)
                saved, free, waiting, left = free, saved, y0 + offset * 8, height
                if width < 16:
                    left = 0
                    for r in range(height):
                        short[:] = 0
                        add_integers(saved + r * 64, short.ctypes.data, mask)
                        for c in range(width):
                            sums[offset + r * columns + c] = (sums[offset + r * columns + c] & mask) + short[c]
    for r in range(left):
        add_integers(saved + r * 64, waiting + r * stride, mask)
    release(registers)


@kernel
def _two_factors(scales, out):  # type: ignore[no-untyped-def]
    """float32 out [T, 2] whose products are the powers of two `scales`; products too small for float32 become 0."""
    for t in range(scales.size):
        first = min(max(scales[t], _SMALLEST), _LARGEST)
        out[t, 0], out[t, 1] = np.float32(first), np.float32(scales[t] / first)


def _packed(x: np.ndarray, is_a: bool, scales: np.ndarray) -> np.ndarray:
    rows, columns = x.shape
    blocks = -(-columns // 16)
    tiles = empty_bytes(blocks * -(-rows // 64) * (A_SIZE if is_a else B_SIZE))
    padded = np.zeros((-(-rows // 4) * 4, 2), np.float32)
    _two_factors(scales, padded[:rows])
    flat = x.reshape(-1)
    in_parts(lambda i, j: _pack(flat, rows, columns, is_a, padded, i, j, tiles), blocks, 16.0 * rows)
    return tiles


@dataclass(frozen=True)
class PackedInputs:
    """The inputs of a layer as B operands, `MAX_TOKENS` tokens in each."""

    tiles: tuple[np.ndarray, ...]


def pack_inputs(x: np.ndarray, x_up: np.ndarray) -> PackedInputs:
    """rne(x[t, k] x_up[t]), at most 2^22; x [T, K] float32, x_up [T] float64, C-contiguous."""
    chunks = [slice(start, start + MAX_TOKENS) for start in range(0, len(x), MAX_TOKENS)]
    return PackedInputs(tuple(_packed(x[chunk], False, x_up[chunk]) for chunk in chunks))


def accumulate(grad: np.ndarray, up: np.ndarray, x: PackedInputs, sums: np.ndarray, fresh: bool) -> None:
    """sums[n, k] += sum_t rne(grad[t, n] up[t]) x[t, k], exactly; `fresh` sums are overwritten.

    grad [T, N] float32, up [T] float64, sums [N, K] int64, all C-contiguous. The integers of grad are at most
    2^27 in magnitude.
    """
    for chunk, b in enumerate(x.tiles):
        tokens = slice(chunk * MAX_TOKENS, (chunk + 1) * MAX_TOKENS)
        a = _packed(grad[tokens], True, up[tokens])
        blocks, (n, k), flat = -(-len(grad[tokens]) // 64), sums.shape, sums.reshape(-1)
        overwrite = fresh and chunk == 0
        in_parts(
            lambda i, j: _accumulate(a, b, blocks, _PALETTE, overwrite, i, j, n, k, flat),  # noqa: B023
            -(-n // 16),
            -(-k // 16) * (blocks * 72.0 + 200.0),
        )
