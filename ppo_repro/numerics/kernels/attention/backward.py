"""Exact attention for CPUs, backward: weights are made again from the scores, block of queries by block.

The grid of a key's gradient follows the largest of its terms over all queries, so the queries are gone through
twice: for their own gradients and the keys' maxima, then for the sums. In between their weights are kept where
they fit into KEPT numbers and made once more where they do not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ppo_repro.numerics.arithmetic.grid import OPERAND_BITS
from ppo_repro.numerics.kernels.attention.block import (
    BLOCK,
    clear_unseen,
    load_block,
    load_rows,
    make_block,
    padded,
    score_tiles,
    weigh,
)
from ppo_repro.numerics.kernels.attention.keys import (
    MAGNITUDE64,
    ONE,
    key_sums,
    load_keys,
    make_keys,
    raise_maxima,
    set_grids,
    store_keys,
)
from ppo_repro.numerics.kernels.attention.tiles import COLUMNS, LANES, ROWS, set_rows
from ppo_repro.numerics.kernels.core.compile import exact_sum, kernel
from ppo_repro.numerics.kernels.core.scalar import exponent64, pow2_64, round_to_f32_plus_zero


class Gradient(NamedTuple):
    """The gradient of a block's results, and what follows from it."""

    rows: np.ndarray  # [BLOCK, padded D] grid integers
    scale: np.ndarray  # [BLOCK]
    results: np.ndarray  # [BLOCK, padded D] grid integers
    results_scale: np.ndarray  # [BLOCK]
    delta: np.ndarray  # [BLOCK] sum_d gradient * result
    folded: np.ndarray  # [BLOCK, width]


@exact_sum
def dot(a, b):  # type: ignore[no-untyped-def]
    """The exact sum of products of grid integers."""
    total = 0.0
    for d in range(a.size):
        total += a[d] * b[d]
    return total


@kernel
def load_delta(block, count, saved, dim, gradient):  # type: ignore[no-untyped-def]
    """delta[i] = sum_d gradient[i, d] result[i, d], both on their grids."""
    dp = padded(dim, LANES)
    load_rows(block, count, saved.out, ONE, OPERAND_BITS, dim, gradient.results, gradient.results_scale)
    for i in range(count):
        product = dot(gradient.rows[i * dp : i * dp + dp], gradient.results[i * dp : i * dp + dp])
        gradient.delta[i] = product * gradient.scale[i] * gradient.results_scale[i]


@kernel
def differentiate(sums, scale, top, total, products, products_scale, delta, rounded):  # type: ignore[no-untyped-def]
    """One query: scores to weights, products of gradient and values to score gradients, both in place."""
    for j in range(sums.size):
        rounded[j] = round_to_f32_plus_zero(sums[j] * scale)
    weigh(rounded, top, sums)
    for j in range(sums.size):
        weight = sums[j] / total
        sums[j] = weight
        products[j] = (products[j] * products_scale - delta) * weight


@kernel
def differentiate_block(block, count, base, width, spec, keys, gradient, top, total, weights, ds):  # type: ignore[no-untyped-def]
    """Softmax weights and gradients of the scores of a block over keys base..base+width-1, 0 where unseen."""
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


@kernel
def fold_scores(ds, scales, bits, folded):  # type: ignore[no-untyped-def]
    """Score gradients times the keys' scales, on the query's grid; its exponent."""
    largest = np.int64(0)
    for j in range(ds.size):
        x = ds[j] * scales[j]
        folded[j] = x
        largest = max(largest, np.float64(x).view(np.int64) & MAGNITUDE64)
    e = exponent64(largest)
    up = pow2_64(bits - e)
    for j in range(ds.size):
        folded[j] = np.rint(folded[j] * up)
    return e


@kernel
def query_gradients(block, count, base, width, spec, keys, gradient, weights, ds, dq):  # type: ignore[no-untyped-def]
    """dq of a block to its places; the keys' maxima; the bits of the largest magnitude."""
    dp, worst, folded = padded(spec.dim, LANES), np.int32(0), gradient.folded
    for i in range(padded(count, ROWS)):
        first, last = block.first[i], block.last[i]
        low, high = block.tile_first[i // ROWS], block.tile_last[i // ROWS]
        begin, end, scale = i * width + first - base, i * width + last - base, block.scale[i]
        if low < high:
            clear_unseen(folded[i * width : i * width + width], base, first, last, low, high)
        block.total[i] = 0.0
        if first < last:
            raise_maxima(ds[begin:end], scale, keys.largest_dk[first:last])
            raise_maxima(weights[begin:end], gradient.scale[i], keys.largest_dv[first:last])
            e = fold_scores(ds[begin:end], keys.scales[first:last], spec.key_bits, folded[begin:end])
            block.total[i] = pow2_64(e - spec.key_bits)
    for column in range(0, dp, COLUMNS):
        for i in range(0, padded(count, ROWS), ROWS):
            low, high = block.tile_first[i // ROWS], block.tile_last[i // ROWS]
            a, b, c, terms = i * width + low - base, low * dp + column, i * dp + column, max(high - low, 0)
            set_rows(folded, a, width, 1, keys.integers, b, dp, block.sums, c, dp, terms, min(COLUMNS, dp - column))
    for i in range(count):
        row, result = block.sums[i * dp : i * dp + spec.dim], dq[block.place[i] : block.place[i] + spec.dim]
        scale = block.total[i]
        for d in range(spec.dim):
            x = round_to_f32_plus_zero(row[d] * scale * spec.scaling)
            result[d] = x
            worst = max(worst, np.int32(np.float32(x).view(np.int32) & 0x7FFFFFFF))
    return worst


@kernel
def score_room(block, spec, first, last):  # type: ignore[no-untyped-def]
    """How many scores all blocks of a span and head have, and the most that one has."""
    everything, most = 0, 0
    for start in range(0, last.size * spec.heads // spec.kv_heads, BLOCK):
        _, _, width = load_block(block, start, spec, first, last, 0)
        everything, most = everything + BLOCK * width, max(most, BLOCK * width)
    return everything, most


@kernel
def backward_row(block, gradient, spec, saved, keys, first, last, place, top, total, dq):  # type: ignore[no-untyped-def]
    """dq of all queries of a span and head, and the sums of its keys; the bits of the largest magnitude of dq."""
    worst, (everything, most) = np.int32(0), score_room(block, spec, first, last)
    keep, factor, dim = everything <= spec.kept, np.float32(spec.scaling), spec.dim
    weights, ds = np.empty(everything if keep else most), np.empty(everything if keep else most)
    for step in range(2):
        at = 0
        for start in range(0, top.size, BLOCK):
            count, base, width = load_block(block, start, spec, first, last, place)
            w, d = weights[at : at + BLOCK * width], ds[at : at + BLOCK * width]
            load_rows(block, count, saved.q, factor, spec.operand_bits, dim, block.queries, block.scale)
            load_rows(block, count, saved.grad, ONE, OPERAND_BITS, dim, gradient.rows, gradient.scale)
            if step == 0 or not keep:
                load_delta(block, count, saved, dim, gradient)
                differentiate_block(block, count, base, width, spec, keys, gradient, top[start:], total[start:], w, d)
            if step == 0:
                worst = max(worst, query_gradients(block, count, base, width, spec, keys, gradient, w, d, dq))
            else:
                key_sums(block, count, base, width, dim, d, block.scale, keys.up_dk, block.queries, keys.dk)
                key_sums(block, count, base, width, dim, w, gradient.scale, keys.up_dv, gradient.rows, keys.dv)
            if keep:
                at += BLOCK * width
        if step == 0:
            set_grids(keys.largest_dk, spec.query_bits, keys.up_dk)
            set_grids(keys.largest_dv, spec.query_bits, keys.up_dv)
    return worst


@kernel
def backward(begin, end, spec, spans, saved, first, last, dq, dk, dv):  # type: ignore[no-untyped-def]
    """Spans and key/value heads begin..end-1 of the gradients, flat as q, k and v; the largest magnitude's bits."""
    dim, groups = spec.dim, spec.heads // spec.kv_heads
    longest, rows, worst = (spans[:, 1] - spans[:, 0]).max(), BLOCK * padded(dim, LANES), np.int32(0)
    block, keys = make_block(dim, longest), make_keys(longest, dim)
    ones, folded = np.ones(BLOCK), np.empty(BLOCK * padded(longest, COLUMNS))
    gradient = Gradient(np.zeros(rows), ones, np.zeros(rows), ones.copy(), ones.copy(), folded)
    for n in range(begin, end):
        head, (a, z) = n % spec.kv_heads, spans[n // spec.kv_heads]
        at, place = (a * spec.kv_heads + head) * dim, (a * spec.heads + head * groups) * dim
        load_keys(saved, at, z - a, spec, keys)
        tops, totals = saved.top[head, a * groups : z * groups], saved.total[head, a * groups : z * groups]
        grown = backward_row(block, gradient, spec, saved, keys, first[a:z], last[a:z], place, tops, totals, dq)
        worst = max(worst, grown)
        worst = max(worst, store_keys(keys.dk, keys.up_dk, at, z - a, spec, dk))
        worst = max(worst, store_keys(keys.dv, keys.up_dv, at, z - a, spec, dv))
    return worst
