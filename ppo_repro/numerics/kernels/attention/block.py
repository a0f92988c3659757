"""One block of queries of one row and key/value head: loading, scores, softmax weights.

The queries of a row are ordered by position, then by head of the group. Every sum of products of grid numbers is
exact and rounded once (`tiles`). Everything else is rounded step by step, as in the reference.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ppo_repro.numerics.kernels.attention.tiles import COLUMNS, LANES, ROWS, set_scores
from ppo_repro.numerics.kernels.core.compile import exact_sum, inline, kernel, kernel_part
from ppo_repro.numerics.kernels.core.scalar import (
    exp32,
    exponent32,
    exponent64,
    magnitude_bits,
    ordered,
    pow2_64,
    round_to_f32_plus_zero,
)

BLOCK = 32
WEIGHT_UNIT = 2.0**30  # the weight of the largest score; weights are rounded to integers
ONE = np.float32(1.0)


class Spec(NamedTuple):
    """The sizes of an attention."""

    heads: int
    kv_heads: int
    dim: int
    scaling: float
    saved_weights: int  # how many weights of a row and head the backward may save


class Block(NamedTuple):
    """Some queries and scratch memory. Query i sees keys first[i]..last[i]-1, or none if last[i] is 0."""

    offset: np.ndarray  # [BLOCK] of each query in a flat array [R, L, H, D]
    first: np.ndarray  # [BLOCK]
    last: np.ndarray  # [BLOCK]
    tile_first: np.ndarray  # [BLOCK / ROWS] smallest `first` and largest `last` of each ROWS queries
    tile_last: np.ndarray
    queries: np.ndarray  # [BLOCK, padded D] float64 grid integers
    scale: np.ndarray  # [BLOCK] of the queries
    scores: np.ndarray  # [BLOCK, width] float64
    rounded: np.ndarray  # [width] float32
    sums: np.ndarray  # [BLOCK, padded D] float64
    top: np.ndarray  # [BLOCK] float32, the largest score
    total: np.ndarray  # [BLOCK] float64, the sum of the weights


@kernel_part
def padded(n, multiple):  # type: ignore[no-untyped-def]
    """`n` rounded up to a multiple."""
    return (n + multiple - 1) // multiple * multiple


@kernel
def cut_spans(first, last, least):  # type: ignore[no-untyped-def]
    """Cut rows of positions [R, L] into spans whose queries see only keys of their own span.

    The query at a position sees keys first..last-1 of its row. Returns begin and end of each span [S, 2] in flat
    [R L], and `first` and `last` [R L] counted from the begin of the span. Spans have at least `least` positions where
    there are that many.
    """
    length, count = first.shape[1], first.size
    closed = np.empty(count, np.bool_)
    low = np.int64(count)
    for p in range(count - 1, -1, -1):
        r, i = p // length, p % length
        low = min(low, r * length + first[r, i] if first[r, i] < last[r, i] else p)
        closed[p] = low >= p
    spans, own_first, own_last = np.empty((count, 2), np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
    cut, begin = 0, 0
    for p in range(1, count + 1):
        if p == count or (closed[p] and p - begin >= least):
            spans[cut, 0], spans[cut, 1] = begin, p
            cut, begin = cut + 1, p
    for s in range(cut):
        for p in range(spans[s, 0], spans[s, 1]):
            r, i = p // length, p % length
            if first[r, i] < last[r, i]:
                own_first[p] = r * length + first[r, i] - spans[s, 0]
                own_last[p] = r * length + last[r, i] - spans[s, 0]
    return spans[:cut], own_first, own_last


@kernel_part
def make_block(dim, keys):  # type: ignore[no-untyped-def]
    """Memory for a block of queries over up to `keys` keys."""
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


@kernel_part
def load_block(block, start, spec, first, last, offset):  # type: ignore[no-untyped-def]
    """Set the block to the queries from `start` on of a row whose positions see keys first..last-1 [L].

    `offset` is that of the group's first head at position 0. Returns the number of queries, the first key and the
    width of the scores, both multiples of COLUMNS.
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
                block.offset[i] = offset + (position * spec.heads + head) * spec.dim
                if first[position] < last[position]:
                    block.first[i], block.last[i] = first[position], last[position]
            block.tile_first[t] = min(block.tile_first[t], block.first[i])
            block.tile_last[t] = max(block.tile_last[t], block.last[i])
        low, high = min(low, block.tile_first[t]), max(high, block.tile_last[t])
    base = low // COLUMNS * COLUMNS
    return count, base, padded(max(high - base, 0), COLUMNS)


@kernel_part
def quantise_row(x, factor, bits, out):  # type: ignore[no-untyped-def]
    """out = grid integers of fl32(x factor), then zeros; out [>= D]. Returns their exponent."""
    largest = np.int32(0)
    for i in range(x.size):
        largest = max(largest, magnitude_bits(x[i] * factor))
    e = exponent32(largest)
    up = pow2_64(bits - e)
    for i in range(x.size):
        out[i] = np.rint(np.float64(x[i] * factor) * up)
    for i in range(x.size, out.size):
        out[i] = 0.0
    return e


@kernel_part
def load_rows(block, count, x, factor, bits, dim, out, scale):  # type: ignore[no-untyped-def]
    """Put the block's rows of x, flat [R, L, H, D], on their grids: integers into `out`, scales into `scale`."""
    dp = padded(dim, LANES)
    for i in range(count):
        row = x[block.offset[i] : block.offset[i] + dim]
        scale[i] = pow2_64(quantise_row(row, factor, bits, out[i * dp : i * dp + dp]) - bits)


@kernel_part
def transpose_rows(rows, dim, out, at):  # type: ignore[no-untyped-def]
    """out[at + d COLUMNS + i] = rows[i, d] for LANES rows of padded D."""
    dp = padded(dim, LANES)
    for d in range(dim):
        for i in range(LANES):
            out[at + d * COLUMNS + i] = rows[i * dp + d]


@kernel_part
def panel_offset(j, dim):  # type: ignore[no-untyped-def]
    """Offset of key j in panels [J / COLUMNS, D, COLUMNS], where the numbers that a tile reads lie side by side."""
    return j // COLUMNS * dim * COLUMNS + j % COLUMNS


@kernel_part
def score_tiles(block, base, width, a, dim, panels, panels_at, out):  # type: ignore[no-untyped-def]
    """out[i, j] = fl64(sum_d a[i, d] b[base + j, d]) where query i sees key base + j; undefined elsewhere."""
    dp = padded(dim, LANES)
    for start in range(0, width, COLUMNS):
        for t in range(BLOCK // ROWS):
            first, last = block.tile_first[t] - base - start, block.tile_last[t] - base - start
            if first < COLUMNS and last > 0:
                skip = max(first, 0) // LANES * LANES
                at, to = panels_at + panel_offset(base + start + skip, dim), t * ROWS * width + start + skip
                wide = min(last, COLUMNS) - skip
                set_scores(a, t * ROWS * dp, dp, 1, panels, at, COLUMNS, out, to, width, dim, wide)


@exact_sum
def sum_of(x):  # type: ignore[no-untyped-def]
    """The exact sum of grid numbers."""
    total = 0.0
    for i in range(x.size):
        total += x[i]
    return total


@kernel_part
def round_scores(sums, scale, rounded):  # type: ignore[no-untyped-def]
    """rounded = fl32(sums scale). Returns the bits of the largest magnitude, and the largest score."""
    worst, top = np.int32(0), np.int32(-(2**31))
    for j in range(sums.size):
        x = round_to_f32_plus_zero(sums[j] * scale)
        rounded[j] = x
        worst = max(worst, magnitude_bits(x))
        top = max(top, ordered(np.float32(x).view(np.int32)))
    return worst, np.int32(ordered(top)).view(np.float32)


@kernel_part
def weigh(rounded, top, weights):  # type: ignore[no-untyped-def]
    """Softmax weights of scores as integers, in units of 1 / WEIGHT_UNIT. Overwrites `rounded`."""
    # up to whole vectors: single exponentials at the end would take as long as all others
    for j in range(padded(weights.size, LANES)):
        rounded[j] = exp32(rounded[j] - top)
    for j in range(weights.size):
        weights[j] = np.rint(np.float64(rounded[j]) * WEIGHT_UNIT)


@inline
def round_to_grid(x, largest, bits):  # type: ignore[no-untyped-def]
    """x = rne(x 2^(bits - e)) in place, with e from `largest`, the bits of the largest magnitude. Returns e."""
    e = exponent64(largest)
    up = pow2_64(bits - e)
    for j in range(x.size):
        x[j] = np.rint(x[j] * up)
    return e


@kernel_part
def clear(x):  # type: ignore[no-untyped-def]
    """Set to zero."""
    for i in range(x.size):
        x[i] = 0.0


@kernel_part
def clear_unseen(row, base, first, last, low, high):  # type: ignore[no-untyped-def]
    """Set `row`, which begins at key `base`, to zero for keys low..high-1 outside first..last-1."""
    if first >= last:
        clear(row[low - base : high - base])
    else:
        clear(row[low - base : first - base])
        clear(row[last - base : high - base])
