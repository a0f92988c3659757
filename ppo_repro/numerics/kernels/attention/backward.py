"""Exact attention for CPUs, backward: weights are recomputed from the scores, one block of queries after another.

The grid of a key's gradient depends on its largest term over all queries, so there are two passes over the queries:
for their own gradients and the keys' maxima, then for the keys' sums. The weights are saved between the passes where
they fit into `spec.saved_weights` numbers, and recomputed where they do not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ppo_repro.numerics.arithmetic.grid import DOT_BITS, LEFT_BITS, RIGHT_BITS, SPLIT_BITS
from ppo_repro.numerics.kernels.attention.block import (
    BLOCK,
    ONE,
    clear_unseen,
    load_block,
    load_rows,
    make_block,
    padded,
    round_to_grid,
    score_tiles,
    weigh,
)
from ppo_repro.numerics.kernels.attention.keys import (
    key_sums,
    load_keys,
    make_keys,
    raise_maxima,
    set_grids,
    store_keys,
)
from ppo_repro.numerics.kernels.attention.tiles import COLUMNS, LANES, ROWS, set_rows
from ppo_repro.numerics.kernels.core.compile import exact_sum, kernel, kernel_part
from ppo_repro.numerics.kernels.core.scalar import magnitude_bits, magnitude_bits_64, pow2_64, round_to_f32_plus_zero

UP, DOWN = 2.0**SPLIT_BITS, 2.0**-SPLIT_BITS
COARSER = 2.0 ** (LEFT_BITS - RIGHT_BITS)  # times the scale of a row on its grid for scores, on that for keys


class Gradient(NamedTuple):
    """The gradient of a block's results, and numbers derived from it."""

    rows: np.ndarray  # [BLOCK, padded D] grid integers
    scale: np.ndarray  # [BLOCK]
    results: np.ndarray  # [BLOCK, padded D] grid integers
    results_scale: np.ndarray  # [BLOCK]
    delta: np.ndarray  # [BLOCK] sum_d gradient * result
    folded: np.ndarray  # [BLOCK, width]


@exact_sum
def split_dot(a, b):  # type: ignore[no-untyped-def]
    """The exact sums of products of two parts of the integers a = above 2^SPLIT_BITS + below with the integers b."""
    above, below = 0.0, 0.0
    for d in range(a.size):
        high = np.rint(a[d] * DOWN)
        above += high * b[d]
        below += (a[d] - high * UP) * b[d]
    return above, below


@kernel_part
def dot(a, b):  # type: ignore[no-untyped-def]
    """fl64(sum_d a[d] b[d]) of integers up to 2^26, as `grid.exact_dot`."""
    # the one rounding of the sum stands apart from the parts, which the compiler may reorder
    above, below = split_dot(a, b)
    return above * UP + below


@kernel_part
def load_delta(block, count, saved, dim, gradient):  # type: ignore[no-untyped-def]
    """delta[i] = fl64(sum_d gradient[i, d] result[i, d]), both rounded to their grids."""
    dp = padded(dim, LANES)
    load_rows(block, count, saved.out, ONE, DOT_BITS, dim, gradient.results, gradient.results_scale)
    for i in range(count):
        product = dot(gradient.rows[i * dp : i * dp + dp], gradient.results[i * dp : i * dp + dp])
        gradient.delta[i] = product * gradient.scale[i] * gradient.results_scale[i]


@kernel_part
def differentiate(sums, scale, top, total, products, products_scale, delta, rounded):  # type: ignore[no-untyped-def]
    """One query: turn scores into weights, and products of gradient and values into score gradients, in place."""
    for j in range(sums.size):
        rounded[j] = round_to_f32_plus_zero(sums[j] * scale)
    weigh(rounded, top, sums)
    for j in range(sums.size):
        weight = sums[j] / total
        sums[j] = weight
        products[j] = (products[j] * products_scale - delta) * weight


@kernel_part
def differentiate_block(block, count, base, width, spec, keys, gradient, top, total, weights, ds):  # type: ignore[no-untyped-def]
    """Softmax weights and score gradients of a block over keys base..base+width-1; 0 for keys it does not see."""
    score_tiles(block, base, width, block.queries, spec.dim, keys.keys, 0, weights)
    score_tiles(block, base, width, gradient.rows, spec.dim, keys.values, 0, ds)
    for i in range(padded(count, ROWS)):
        first, last = block.first[i], block.last[i]
        weight_row, ds_row = weights[i * width : i * width + width], ds[i * width : i * width + width]
        clear_unseen(weight_row, base, first, last, base, base + width)
        clear_unseen(ds_row, base, first, last, base, base + width)
        if first < last:
            own, own_ds = weight_row[first - base : last - base], ds_row[first - base : last - base]
            scale, delta = gradient.scale[i], gradient.delta[i]
            differentiate(own, block.scale[i], top[i], total[i], own_ds, scale, delta, block.rounded)


@kernel_part
def fold_scores(ds, scales, folded):  # type: ignore[no-untyped-def]
    """folded = score gradients times the keys' scales, on the query's grid. Returns its exponent."""
    largest = np.int64(0)
    for j in range(ds.size):
        x = ds[j] * scales[j]
        folded[j] = x
        largest = max(largest, magnitude_bits_64(x))
    return round_to_grid(folded, largest, LEFT_BITS)


@kernel_part
def query_gradients(block, count, base, width, spec, keys, gradient, weights, ds, dq):  # type: ignore[no-untyped-def]
    """Write dq of a block and update the keys' maxima. Returns the bits of the largest magnitude of dq."""
    dp, worst, folded = padded(spec.dim, LANES), np.int32(0), gradient.folded
    for i in range(padded(count, ROWS)):
        first, last = block.first[i], block.last[i]
        low, high = block.tile_first[i // ROWS], block.tile_last[i // ROWS]
        begin, end, scale = i * width + first - base, i * width + last - base, block.scale[i]
        if low < high:
            clear_unseen(folded[i * width : i * width + width], base, first, last, low, high)
        block.total[i] = 0.0
        if first < last:
            raise_maxima(ds[begin:end], scale * COARSER, keys.largest_dk[first:last])
            raise_maxima(weights[begin:end], gradient.scale[i] * COARSER, keys.largest_dv[first:last])
            e = fold_scores(ds[begin:end], keys.scales[first:last], folded[begin:end])
            block.total[i] = pow2_64(e - LEFT_BITS)
    for column in range(0, dp, COLUMNS):
        for i in range(0, padded(count, ROWS), ROWS):
            low, high = block.tile_first[i // ROWS], block.tile_last[i // ROWS]
            a, b, c, terms = i * width + low - base, low * dp + column, i * dp + column, max(high - low, 0)
            set_rows(folded, a, width, 1, keys.integers, b, dp, block.sums, c, dp, terms, min(COLUMNS, dp - column))
    for i in range(count):
        row, result = block.sums[i * dp : i * dp + spec.dim], dq[block.offset[i] : block.offset[i] + spec.dim]
        scale = block.total[i]
        for d in range(spec.dim):
            x = round_to_f32_plus_zero(row[d] * scale * spec.scaling)
            result[d] = x
            worst = max(worst, magnitude_bits(x))
    return worst


@kernel_part
def count_scores(block, spec, first, last):  # type: ignore[no-untyped-def]
    """The number of scores of all blocks of a span and head, and the largest number of one block."""
    all_blocks, largest_block = 0, 0
    for start in range(0, last.size * spec.heads // spec.kv_heads, BLOCK):
        _, _, width = load_block(block, start, spec, first, last, 0)
        all_blocks, largest_block = all_blocks + BLOCK * width, max(largest_block, BLOCK * width)
    return all_blocks, largest_block


@kernel_part
def backward_row(block, gradient, spec, saved, keys, first, last, offset, top, total, dq):  # type: ignore[no-untyped-def]
    """dq of all queries of a span and head, and the sums of its keys. Returns the largest magnitude's bits of dq."""
    worst, (all_blocks, largest_block) = np.int32(0), count_scores(block, spec, first, last)
    save, factor, dim = all_blocks <= spec.saved_weights, np.float32(spec.scaling), spec.dim
    size = all_blocks if save else largest_block
    weights, ds = np.empty(size), np.empty(size)
    for step in range(2):
        at = 0
        for start in range(0, top.size, BLOCK):
            count, base, width = load_block(block, start, spec, first, last, offset)
            w, d = weights[at : at + BLOCK * width], ds[at : at + BLOCK * width]
            if step == 0 or not save:
                load_rows(block, count, saved.q, factor, LEFT_BITS, dim, block.queries, block.scale)
                load_rows(block, count, saved.grad, ONE, LEFT_BITS, dim, gradient.rows, gradient.scale)
                load_delta(block, count, saved, dim, gradient)
                differentiate_block(block, count, base, width, spec, keys, gradient, top[start:], total[start:], w, d)
            if step == 0:
                worst = max(worst, query_gradients(block, count, base, width, spec, keys, gradient, w, d, dq))
            else:
                load_rows(block, count, saved.q, factor, RIGHT_BITS, dim, block.queries, block.scale)
                load_rows(block, count, saved.grad, ONE, RIGHT_BITS, dim, gradient.rows, gradient.scale)
                dk, dv = (keys.dk_high, keys.dk_low), (keys.dv_high, keys.dv_low)
                key_sums(block, count, base, width, dim, d, block.scale, keys.up_dk, block.queries, *dk)
                key_sums(block, count, base, width, dim, w, gradient.scale, keys.up_dv, gradient.rows, *dv)
            if save:
                at += BLOCK * width
        if step == 0:
            set_grids(keys.largest_dk, keys.up_dk)
            set_grids(keys.largest_dv, keys.up_dv)
    return worst


@kernel
def backward(begin, end, spec, spans, saved, first, last, dq, dk, dv):  # type: ignore[no-untyped-def]
    """dq, dk, dv of spans and key/value heads begin..end-1, flat as q, k, v. Returns the largest magnitude's bits."""
    dim, groups = spec.dim, spec.heads // spec.kv_heads
    longest, rows, worst = (spans[:, 1] - spans[:, 0]).max(), BLOCK * padded(dim, LANES), np.int32(0)
    block, keys = make_block(dim, longest), make_keys(longest, dim)
    ones, folded = np.ones(BLOCK), np.empty(BLOCK * padded(longest, COLUMNS))
    gradient = Gradient(np.zeros(rows), ones, np.zeros(rows), ones.copy(), ones.copy(), folded)
    for n in range(begin, end):
        head, (a, z) = n % spec.kv_heads, spans[n // spec.kv_heads]
        at, offset = (a * spec.kv_heads + head) * dim, (a * spec.heads + head * groups) * dim
        load_keys(saved, at, z - a, spec, keys)
        tops, totals = saved.top[head, a * groups : z * groups], saved.total[head, a * groups : z * groups]
        largest = backward_row(block, gradient, spec, saved, keys, first[a:z], last[a:z], offset, tops, totals, dq)
        worst = max(worst, largest)
        worst = max(worst, store_keys(keys.dk_high, keys.dk_low, keys.up_dk, at, z - a, spec, dk))
        worst = max(worst, store_keys(keys.dv_high, keys.dv_low, keys.up_dv, at, z - a, spec, dv))
    return worst
