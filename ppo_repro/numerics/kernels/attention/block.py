"""One block of queries of one row and key/value head, and what it takes to weigh the keys they see.

The queries of a row are taken position by position, the heads of the group side by side. Every sum is a
product of grid numbers in float64 (`tiles`); everything else is rounded step by step, as the reference does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ppo_repro.numerics.kernels.attention.tiles import COLUMNS, LANES, ROWS, set_rows
from ppo_repro.numerics.kernels.core.compile import exact_sum, kernel
from ppo_repro.numerics.kernels.core.scalar import exp32, exponent32, pow2_64, round_to_f32_plus_zero

BLOCK = 32
WEIGHT_UNIT = 2.0**30


class Spec(NamedTuple):
    """The sizes of an attention and the bits of its grids, see `numerics.attention`."""

    heads: int
    kv_heads: int
    dim: int
    scaling: float
    operand_bits: int  # of queries and keys
    key_bits: int  # of what is summed over keys
    query_bits: int  # of what is summed over queries
    kept: int  # how many weights of a row and head the backward may hold at a time


class Block(NamedTuple):
    """Some queries, and room for what is made of them. Query i sees keys first[i]..last[i]-1, or last[i] is 0."""

    place: np.ndarray  # [BLOCK] of each query in flat [R, L, H, D]
    first: np.ndarray  # [BLOCK]
    last: np.ndarray  # [BLOCK]
    tile_first: np.ndarray  # [BLOCK / ROWS] smallest `first`, and largest `last`, of ROWS queries
    tile_last: np.ndarray
    queries: np.ndarray  # [BLOCK, padded D] float64 grid integers
    scale: np.ndarray  # [BLOCK] of the queries
    scores: np.ndarray  # [BLOCK, width] float64
    rounded: np.ndarray  # [width] float32
    sums: np.ndarray  # [BLOCK, padded D] float64
    top: np.ndarray  # [BLOCK] float32, the largest score
    total: np.ndarray  # [BLOCK] float64, the sum of the weights


@kernel
def padded(n, multiple):  # type: ignore[no-untyped-def]
    """`n` rounded up."""
    return (n + multiple - 1) // multiple * multiple


@kernel
def cut_spans(first, last, least):  # type: ignore[no-untyped-def]
    """Cut rows of positions [R, L] that see keys first..last-1 into spans that see nothing outside of themselves.

    Returns begin and end [S, 2] of spans in flat [R L], of at least `least` positions where there are as many,
    and `first` and `last` [R L] counted from the begin of their span.
    """
    length, count = first.shape[1], first.size
    closed = np.empty(count, np.bool_)
    low = np.int64(count)
    for p in range(count - 1, -1, -1):
        r, i = p // length, p % length
        low = min(low, r * length + first[r, i] if first[r, i] < last[r, i] else p)
        closed[p] = low >= p
    spans, own_first, own_last = np.empty((count, 2), np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
    found, begin = 0, 0
    for p in range(1, count + 1):
        if p == count or (closed[p] and p - begin >= least):
            spans[found, 0], spans[found, 1] = begin, p
            found, begin = found + 1, p
    for s in range(found):
        for p in range(spans[s, 0], spans[s, 1]):
            r, i = p // length, p % length
            if first[r, i] < last[r, i]:
                own_first[p] = r * length + first[r, i] - spans[s, 0]
                own_last[p] = r * length + last[r, i] - spans[s, 0]
    return spans[:found], own_first, own_last


@kernel
def make_block(dim, keys):  # type: ignore[no-untyped-def]
    """Room for a block of queries over up to `keys` keys."""
    tiles, width = BLOCK // ROWS, padded(keys, COLUMNS)
    return Block(
        np.zeros(BLOCK, np.int64),
        np.zeros(BLOCK, np.int64),
        np.zeros(BLOCK, np.int64),
        np.zeros(tiles, np.int64),
        np.zeros(tiles, np.int64),
        np.zeros(BLOCK * padded(dim, LANES)),
        np.ones(BLOCK),
        np.empty(BLOCK * width),
        np.zeros(width, np.float32),
        np.empty(BLOCK * padded(dim, LANES)),
        np.zeros(BLOCK, np.float32),
        np.ones(BLOCK),
    )


@kernel
def load_block(block, start, spec, first, last, place):  # type: ignore[no-untyped-def]
    """Aim at queries `start` on of a row that see first..last-1 [L]; -> their number, first key, width of scores.

    `place` is that of the group's first head at position 0. First key and width are multiples of COLUMNS.
    """
    groups = spec.heads // spec.kv_heads
    count = min(BLOCK, last.size * groups - start)
    low, high = np.int64(2**62), np.int64(0)
    for t in range(BLOCK // ROWS):
        block.tile_first[t], block.tile_last[t] = 2**62, 0
        for i in range(t * ROWS, t * ROWS + ROWS):
            position, head = (start + i) // groups, (start + i) % groups
            block.first[i], block.last[i] = 2**62, 0
            if i < count:
                block.place[i] = place + (position * spec.heads + head) * spec.dim
                if first[position] < last[position]:
                    block.first[i], block.last[i] = first[position], last[position]
            block.tile_first[t] = min(block.tile_first[t], block.first[i])
            block.tile_last[t] = max(block.tile_last[t], block.last[i])
        low, high = min(low, block.tile_first[t]), max(high, block.tile_last[t])
    base = low // COLUMNS * COLUMNS
    return count, base, padded(max(high - base, 0), COLUMNS)


@kernel
def quantise_row(x, factor, bits, out):  # type: ignore[no-untyped-def]
    """Grid integers of fl32(x factor), and their exponent; `out` [>= D] is filled up with zeros."""
    largest = np.int32(0)
    for i in range(x.size):
        largest = max(largest, np.int32(np.float32(x[i] * factor).view(np.int32) & 0x7FFFFFFF))
    e = exponent32(largest)
    up = pow2_64(bits - e)
    for i in range(x.size):
        out[i] = np.rint(np.float64(x[i] * factor) * up)
    for i in range(x.size, out.size):
        out[i] = 0.0
    return e


@kernel
def load_rows(block, count, x, factor, bits, dim, out, scale):  # type: ignore[no-untyped-def]
    """Put the block's rows of x, flat [R, L, H, D], on their grids: integers to `out`, scales to `scale`."""
    dp = padded(dim, LANES)
    for i in range(count):
        row = x[block.place[i] : block.place[i] + dim]
        scale[i] = pow2_64(quantise_row(row, factor, bits, out[i * dp : i * dp + dp]) - bits)


@kernel
def transpose_rows(rows, dim, out, at):  # type: ignore[no-untyped-def]
    """out[at + d COLUMNS + i] = rows[i, d] for LANES rows of padded D."""
    dp = padded(dim, LANES)
    for d in range(dim):
        for i in range(LANES):
            out[at + d * COLUMNS + i] = rows[i * dp + d]


@kernel
def panel_place(j, dim):  # type: ignore[no-untyped-def]
    """Where key j begins in panels [J / COLUMNS, D, COLUMNS]; panels keep what a tile reads side by side."""
    return j // COLUMNS * dim * COLUMNS + j % COLUMNS


@kernel
def score_tiles(block, base, width, a, dim, panels, panels_at, out):  # type: ignore[no-untyped-def]
    """out[i, j] = sum_d a[i, d] b[base + j, d] wherever query i sees key base + j; elsewhere anything."""
    dp = padded(dim, LANES)
    for start in range(0, width, COLUMNS):
        for t in range(BLOCK // ROWS):
            first, last = block.tile_first[t] - base - start, block.tile_last[t] - base - start
            if first < COLUMNS and last > 0:
                skip = max(first, 0) // LANES * LANES
                at, to = panels_at + panel_place(base + start + skip, dim), t * ROWS * width + start + skip
                wide = min(last, COLUMNS) - skip
                set_rows(a, t * ROWS * dp, dp, 1, panels, at, COLUMNS, out, to, width, dim, wide)


@exact_sum
def sum_of(x):  # type: ignore[no-untyped-def]
    """The exact sum of grid numbers."""
    total = 0.0
    for i in range(x.size):
        total += x[i]
    return total


@kernel
def round_scores(sums, scale, rounded):  # type: ignore[no-untyped-def]
    """Scores as float32; the bits of the largest magnitude, and the largest score."""
    worst, top = np.int32(0), np.int32(-(2**31))
    for j in range(sums.size):
        x = round_to_f32_plus_zero(sums[j] * scale)
        rounded[j] = x
        bits = np.float32(x).view(np.int32)
        worst = max(worst, np.int32(bits & 0x7FFFFFFF))
        # as integers, negative numbers are in the wrong order until their magnitude is turned round
        top = max(top, np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF)))
    top = np.int32(top ^ ((top >> 31) & 0x7FFFFFFF))
    return worst, np.int32(top).view(np.float32)


@kernel
def weigh(rounded, top, weights):  # type: ignore[no-untyped-def]
    """Softmax weights of scores as integers in units of 1 / WEIGHT_UNIT; what `rounded` holds is used up."""
    # beyond the row up to whole vectors: a loop of single exponentials would take as long as the rest
    for j in range(padded(weights.size, LANES)):
        rounded[j] = exp32(rounded[j] - top)
    for j in range(weights.size):
        weights[j] = np.rint(np.float64(rounded[j]) * WEIGHT_UNIT)


@kernel
def clear(x):  # type: ignore[no-untyped-def]
    """Set to zero."""
    for i in range(x.size):
        x[i] = 0.0


@kernel
def clear_unseen(row, base, first, last, low, high):  # type: ignore[no-untyped-def]
    """Set to zero what `row`, which begins at key `base`, holds for keys low..high-1 outside first..last-1."""
    if first >= last:
        clear(row[low - base : high - base])
    else:
        clear(row[low - base : first - base])
        clear(row[last - base : high - base])
