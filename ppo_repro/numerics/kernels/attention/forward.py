"""Exact attention for CPUs, forward: only visible keys are read, and no [L, L] matrix is stored.

Sums are exact and rounded once; everything else is rounded step by step, as in the reference.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ppo_repro.numerics.arithmetic.grid import LEFT_BITS, RIGHT_BITS
from ppo_repro.numerics.kernels.attention.block import (
    BLOCK,
    ONE,
    clear_unseen,
    load_block,
    load_rows,
    make_block,
    padded,
    panel_offset,
    quantise_row,
    round_scores,
    round_to_grid,
    score_tiles,
    sum_of,
    transpose_rows,
    weigh,
)
from ppo_repro.numerics.kernels.attention.tiles import COLUMNS, LANES, ROWS, set_rows
from ppo_repro.numerics.kernels.core.compile import kernel, kernel_part
from ppo_repro.numerics.kernels.core.scalar import magnitude_bits, magnitude_bits_64, pow2_64, round_to_f32_plus_zero


class GridKeys(NamedTuple):
    """Keys and values on their grids: flat arrays, and the offsets at which those of one head begin."""

    panels: np.ndarray  # [J / COLUMNS, D, COLUMNS] grid numbers of keys
    panels_at: int
    values: np.ndarray  # [J, padded D] grid integers
    values_at: int
    values_row: int  # padded D
    scales: np.ndarray  # [J] of the values


@kernel_part
def fold(weights, scales):  # type: ignore[no-untyped-def]
    """Multiply weights by the scales of their values and put them on one grid, in place. Returns its exponent."""
    largest = np.int64(0)
    for j in range(weights.size):
        folded = weights[j] * np.float64(scales[j])
        weights[j] = folded
        largest = max(largest, magnitude_bits_64(folded))
    return round_to_grid(weights, largest, LEFT_BITS)


@kernel_part
def weigh_block(block, count, base, width, keys):  # type: ignore[no-untyped-def]
    """Turn scores into folded weights, in place. Returns the bits of the largest magnitude of a score."""
    worst = np.int32(0)
    for i in range(padded(count, ROWS)):
        low, high, first, last = block.tile_first[i // ROWS], block.tile_last[i // ROWS], block.first[i], block.last[i]
        block.top[i], block.total[i] = 0.0, 1.0
        if low >= high:
            continue
        row = block.scores[i * width : i * width + width]
        clear_unseen(row, base, first, last, low, high)
        if first < last:
            own = row[first - base : last - base]
            magnitude, top = round_scores(own, block.scale[i], block.rounded)
            worst = max(worst, magnitude)
            weigh(block.rounded, top, own)
            block.top[i], block.total[i] = top, sum_of(own)
            block.scale[i] = pow2_64(fold(own, keys.scales[first:last]) - LEFT_BITS)
    return worst


@kernel_part
def sum_values(block, count, base, width, dim, keys):  # type: ignore[no-untyped-def]
    """sums[i, d] = fl64(sum_j weights[i, j] values[j, d])."""
    dp = padded(dim, LANES)
    for column in range(0, dp, COLUMNS):
        columns, b = min(COLUMNS, dp - column), keys.values_at + column
        for i in range(0, padded(count, ROWS), ROWS):
            low, high = block.tile_first[i // ROWS], block.tile_last[i // ROWS]
            a, c, terms = i * width + low - base, i * dp + column, max(high - low, 0)
            b_row = keys.values_row
            set_rows(block.scores, a, width, 1, keys.values, b + low * b_row, b_row, block.sums, c, dp, terms, columns)


@kernel_part
def store_block(block, count, dim, out):  # type: ignore[no-untyped-def]
    """Write results to `out`, flat [R, L, H, D]. Returns the bits of the largest magnitude."""
    dp, worst = padded(dim, LANES), np.int32(0)
    for i in range(count):
        row, result = block.sums[i * dp : i * dp + dim], out[block.offset[i] : block.offset[i] + dim]
        scale, total = block.scale[i], block.total[i]
        for d in range(dim):
            x = round_to_f32_plus_zero(row[d] * scale / total)
            result[d] = x
            worst = max(worst, magnitude_bits(x))
    return worst


@kernel_part
def attend_row(block, spec, keys, q, first, last, offset, out, top, total):  # type: ignore[no-untyped-def]
    """Attention of all queries of a span and key/value head; also `top` and `total` of each query [L groups].

    `top` is a query's largest score and `total` the sum of its weights. Returns the bits of the largest magnitude of
    scores and results.
    """
    worst = np.int32(0)
    for start in range(0, top.size, BLOCK):
        count, base, width = load_block(block, start, spec, first, last, offset)
        load_rows(block, count, q, np.float32(spec.scaling), LEFT_BITS, spec.dim, block.queries, block.scale)
        score_tiles(block, base, width, block.queries, spec.dim, keys.panels, keys.panels_at, block.scores)
        worst = max(worst, weigh_block(block, count, base, width, keys))
        sum_values(block, count, base, width, spec.dim, keys)
        worst = max(worst, store_block(block, count, spec.dim, out))
        for i in range(count):
            top[start + i], total[start + i] = block.top[i], block.total[i]
    return worst


@kernel_part
def load_keys(k, v, at, length, spec, keys):  # type: ignore[no-untyped-def]
    """Put `length` keys and values of flat [.., Hk, D] on their grids; the first begins at offset `at`."""
    dim, dp, stride = spec.dim, padded(spec.dim, LANES), spec.kv_heads * spec.dim
    rows = np.zeros(LANES * dp)
    for j in range(length):
        begin, lane = at + j * stride, j % LANES
        row = rows[lane * dp : lane * dp + dp]
        scale = pow2_64(quantise_row(k[begin : begin + dim], ONE, RIGHT_BITS, row) - RIGHT_BITS)
        for d in range(dim):
            row[d] *= scale
        if lane == LANES - 1 or j == length - 1:
            transpose_rows(rows, dim, keys.panels, panel_offset(j - lane, dim))
        row = keys.values[j * dp : j * dp + dp]
        keys.scales[j] = pow2_64(quantise_row(v[begin : begin + dim], ONE, RIGHT_BITS, row) - RIGHT_BITS)


@kernel
def forward(begin, end, spec, spans, q, k, v, first, last, out, top, total):  # type: ignore[no-untyped-def]
    """softmax(q k^T scaling) v of spans and key/value heads begin..end-1. Returns the bits of the largest magnitude.

    q, out [R L, H, D] and k, v [R L, Hk, D] float32, flat; spans, first and last are results of `cut_spans`; top
    float32 and total float64 [Hk, R L H / Hk] are for the backward.
    """
    dim, dp, groups = spec.dim, padded(spec.dim, LANES), spec.heads // spec.kv_heads
    longest = (spans[:, 1] - spans[:, 0]).max()
    block, worst = make_block(dim, longest), np.int32(0)
    keys = GridKeys(np.empty(padded(longest, COLUMNS) * dim), 0, np.empty(longest * dp), 0, dp, np.empty(longest))
    for n in range(begin, end):
        head, (a, z) = n % spec.kv_heads, spans[n // spec.kv_heads]
        load_keys(k, v, (a * spec.kv_heads + head) * dim, z - a, spec, keys)
        tops, totals = top[head, a * groups : z * groups], total[head, a * groups : z * groups]
        offset = (a * spec.heads + head * groups) * dim
        worst = max(worst, attend_row(block, spec, keys, q, first[a:z], last[a:z], offset, out, tops, totals))
    return worst


@kernel
def forward_cached(begin, end, spec, q, slots, first, last, keys, values, scales, out):  # type: ignore[no-untyped-def]
    """`forward` over cached keys and values: row r sees positions first..last-1, each [R, L], of slot slots[r].

    keys [slots, Hk, context / COLUMNS, D, COLUMNS] grid numbers, values [slots, Hk, context, padded D] grid integers,
    scales [slots, Hk, context], float32.
    """
    length, groups, dim = first.shape[1], spec.heads // spec.kv_heads, spec.dim
    context, values_row = values.shape[2], values.shape[3]
    block, worst = make_block(dim, last.max()), np.int32(0)
    top, total = np.empty(length * groups, np.float32), np.empty(length * groups)
    panels, rows, panels_size = keys.reshape(-1), values.reshape(-1), keys.shape[2] * dim * COLUMNS
    for n in range(begin, end):
        r, head = n // spec.kv_heads, n % spec.kv_heads
        at = slots[r] * spec.kv_heads + head
        cached = GridKeys(panels, at * panels_size, rows, at * context * values_row, values_row, scales[slots[r], head])
        offset = (r * length * spec.heads + head * groups) * dim
        worst = max(worst, attend_row(block, spec, cached, q, first[r], last[r], offset, out, top, total))
    return worst


@kernel
def store(begin, end, spec, slots, positions, valid, k, v, keys, values, scales):  # type: ignore[no-untyped-def]
    """Put new keys and values [R, L, Hk, D] of rows begin..end-1 on their grids and into their slots."""
    dim, length = spec.dim, positions.shape[1]
    row = np.empty(dim)
    for r in range(begin, end):
        for i in range(length):
            if not valid[r, i]:
                continue
            slot, position = slots[r], positions[r, i]
            for head in range(spec.kv_heads):
                at = ((r * length + i) * spec.kv_heads + head) * dim
                scale = pow2_64(quantise_row(k[at : at + dim], ONE, RIGHT_BITS, row) - RIGHT_BITS)
                for d in range(dim):
                    keys[slot, head, position // COLUMNS, d, position % COLUMNS] = row[d] * scale
                scale = pow2_64(quantise_row(v[at : at + dim], ONE, RIGHT_BITS, row) - RIGHT_BITS)
                for d in range(dim):
                    values[slot, head, position, d] = row[d]
                scales[slot, head, position] = scale
