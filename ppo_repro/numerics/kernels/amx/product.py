"""Contractions on AMX: products of digits are summed exactly in int32 tiles, these in int64, then rounded once."""

from __future__ import annotations

import numpy as np

from ppo_repro.numerics.kernels.amx.operands import PackedRows, PackedWeight
from ppo_repro.numerics.kernels.amx.tiles import (
    A_SIZE,
    B_SIZE,
    SAVED,
    STATE,
    clear,
    configuration,
    configure,
    fetch,
    multiply,
    release,
    save,
    write,
)
from ppo_repro.numerics.kernels.core.compile import kernel
from ppo_repro.numerics.kernels.core.memory import LINE, align_to_line
from ppo_repro.numerics.kernels.core.pool import in_parts

CONFIGURATIONS = np.stack([configuration(max(rows, 1)) for rows in range(17)])


@kernel
def multiply_blocks(  # type: ignore[no-untyped-def]
    palette, a, a_scales, b, b_scales, bias, blocks, first, last, from_column, to_column, rows, columns, y
):
    """Row blocks first..last-1 times column blocks from_column..to_column-1 into flat y [rows, columns]."""
    scratch, short = align_to_line(np.empty(2 * SAVED + STATE + LINE, np.int8)), np.zeros(16, np.float32)
    a0, b0, c0, y0, s0 = a.ctypes.data, b.ctypes.data, b_scales.ctypes.data, y.ctypes.data, scratch.ctypes.data
    registers, stride, zeros = s0 + 2 * SAVED, columns * 4, np.zeros(16, np.float32)
    bias0, bias_step = (bias.ctypes.data, 64) if bias.size > 0 else (zeros.ctypes.data, 0)
    # as many row blocks at a time as stay in the second-level cache while all columns are multiplied
    step, a_strip, strip = max(1, (1 << 20) // (blocks * A_SIZE)), blocks * A_SIZE, blocks * B_SIZE
    # fetch the next columns, unless all stay in that cache or two strips of columns leave no room for the rows
    fetches = strip * (to_column - from_column) > 1 << 20 and strip <= 1 << 18
    # a tile's rows are rounded while the next tile is multiplied: tiles and vectors use different ports of the core
    share, left, saved, free = (15 + blocks) // blocks, 0, s0, s0 + SAVED
    row0, column_scales, biases, target = 0, c0, bias0, y0
    configure(registers, palette.ctypes.data)
    for start in range(first, last, step):
        lines = -(-(B_SIZE // 64) // (min(last, start + step) - start))
        for n in range(from_column, to_column):
            width = min(16, columns - n * 16)
            for m in range(start, min(last, start + step)):
                pa, pb, row = a0 + m * a_strip, b0 + n * strip, 0
                ahead = pb + strip + (m - start) * blocks * lines * 64
                clear(registers)
                for _ in range(blocks):
                    if fetches:
                        for line in range(lines):
                            fetch(ahead + line * 64)
                        ahead += lines * 64
                    multiply(registers, pa, pb)
                    pa += A_SIZE
                    pb += B_SIZE
                    for r in range(row, min(left, row + share)):
                        write(saved + r * 64, a_scales[row0 + r], column_scales, biases, target + r * stride)
                    row += share
                save(registers, free)
                saved, free, left, row0 = free, saved, min(16, rows - m * 16), m * 16
                column_scales, biases, target = c0 + n * 128, bias0 + n * bias_step, y0 + row0 * stride + n * 64
                if width < 16:
                    for r in range(left):
                        write(saved + r * 64, a_scales[row0 + r], column_scales, biases, short.ctypes.data)
                        for c in range(width):
                            y[(row0 + r) * columns + n * 16 + c] = short[c]
                    left = 0
    for r in range(left):
        write(saved + r * 64, a_scales[row0 + r], column_scales, biases, target + r * stride)
    release(registers)


def padded_bias(bias: np.ndarray) -> np.ndarray:
    """The bias, padded with zeros to a multiple of 16 elements."""
    missing = -len(bias) % 16
    return np.concatenate([bias, np.zeros(missing, np.float32)]) if missing else bias


def contract(x: PackedRows, weight: PackedWeight, bias: np.ndarray, y: np.ndarray) -> bool:
    """y = fl32(fl64(sum of x w on their grids)) + 0 [+ bias], without outliers; y [M, columns] float32, C-contiguous.

    Returns False, with y undefined, if x or w holds an infinity or NaN. ValueError if their terms differ.
    """
    if x.terms != weight.terms:
        raise ValueError(f"{x.terms} terms times {weight.terms}")
    if not (x.finite and weight.finite):
        return False
    rows, a, scales = x.rows, x.tiles, x.scales
    blocks, row_blocks, column_blocks = -(-weight.terms // 64), -(-rows // 16), -(-weight.columns // 16)
    palette, out = CONFIGURATIONS[min(16, rows)], y.reshape(-1)
    tile_time = blocks * 72.0 + 200.0

    def run(first: int, last: int, from_column: int, to_column: int) -> None:
        multiply_blocks(
            palette, a, scales, weight.tiles, weight.scales, bias, blocks,
            first, last, from_column, to_column, rows, weight.columns, out,
        )  # fmt: skip

    if row_blocks >= 4:
        in_parts(lambda i, j: run(i, j, 0, column_blocks), row_blocks, column_blocks * tile_time)
    else:
        in_parts(lambda i, j: run(0, row_blocks, i, j), column_blocks, row_blocks * tile_time)
    return True
