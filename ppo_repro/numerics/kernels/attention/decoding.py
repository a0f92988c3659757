"""Exact attention of one new token of each row over cached keys and values; the bits of `forward.forward_cached`."""

from __future__ import annotations

import numpy as np

from ppo_repro.numerics.arithmetic.grid import LEFT_BITS
from ppo_repro.numerics.kernels.attention.block import panel_offset, round_scores, sum_of, weigh
from ppo_repro.numerics.kernels.attention.forward import fold
from ppo_repro.numerics.kernels.attention.tiles import COLUMNS, ROWS, set_rows, set_scores, set_tile
from ppo_repro.numerics.kernels.core.compile import inline, kernel_part
from ppo_repro.numerics.kernels.core.rows import largest_bits
from ppo_repro.numerics.kernels.core.scalar import exponent32, pow2_64, round_to_f32_plus_zero

# no literals, which the kernels of tiles would be compiled for once more
_NONE, _NEXT, _ROW = np.int64(0), np.int64(1), np.int64(COLUMNS)
# of two queries; with one or two heads in a group whole tiles would be half empty
_scores_of_2, _rows_of_2 = set_tile(4, False, 2), set_tile(4, True, 2)


@inline
def _load(q, factor, dim, scaled, queries):  # type: ignore[no-untyped-def]
    """queries = the grid integers of fl32(q factor). Returns their scale."""
    for d in range(dim):
        scaled[d] = q[d] * factor
    e = exponent32(largest_bits(scaled[:dim].view(np.int32)))
    up = pow2_64(LEFT_BITS - e)
    for d in range(dim):
        queries[d] = np.rint(np.float64(scaled[d]) * up)
    return pow2_64(e - LEFT_BITS)


@inline
def _score(count, queries, dim, padded, panels, at, base, last, width, scores):  # type: ignore[no-untyped-def]
    """scores[i, j] = fl64(sum_d queries[i, d] keys[base + j, d]) of whole panels up to key last - 1."""
    for start in range(0, last - base, COLUMNS):
        b, wide = at + panel_offset(base + start, dim), last - base - start
        if count <= 2:
            _scores_of_2(queries, 0, padded, 1, panels, b, COLUMNS, scores, start, width, dim)
        else:
            set_scores(queries, _NONE, padded, _NEXT, panels, b, _ROW, scores, start, width, dim, min(wide, COLUMNS))


@inline
def _sum(count, weights, skip, width, values, at, padded, terms, sums):  # type: ignore[no-untyped-def]
    """sums[i, d] = fl64(sum_j weights[i, skip + j] values[j, d])."""
    column = 0
    if count <= 2:
        while column + COLUMNS <= padded:
            _rows_of_2(weights, skip, width, 1, values, at + column, padded, sums, column, padded, terms)
            column += COLUMNS
    if column < padded:
        for c in range(column, padded, COLUMNS):
            wide = min(COLUMNS, padded - c)
            set_rows(weights, skip, width, _NEXT, values, at + c, padded, sums, c, padded, terms, wide)


@kernel_part
def forward_single(rows, spec, q, slots, first, last, keys, values, scales, out):  # type: ignore[no-untyped-def]
    """Attention of one query position of each row; arguments and result as of `forward_cached`, first and last [R]."""
    dim, groups, padded, context = spec.dim, spec.heads // spec.kv_heads, values.shape[3], values.shape[2]
    width = (last.max() + COLUMNS - 1) // COLUMNS * COLUMNS + COLUMNS
    queries, scaled, scale = np.zeros(ROWS * padded), np.empty(padded, np.float32), np.empty(ROWS)
    total = np.empty(ROWS)
    scores, sums = np.zeros(ROWS * width), np.empty(ROWS * padded)
    rounded, worst = np.zeros(width, np.float32), np.int32(0)
    panels, stored, panels_size = keys.reshape(-1), values.reshape(-1), keys.shape[2] * dim * COLUMNS
    for n in range(rows * spec.kv_heads):
        r, head = n // spec.kv_heads, n % spec.kv_heads
        low, high, at = first[r], last[r], slots[r] * spec.kv_heads + head
        base, terms = low // COLUMNS * COLUMNS, high - low
        own_scales = scales[slots[r], head, low:high]
        for start in range(0, groups, ROWS):
            count, begin = min(ROWS, groups - start), (r * spec.heads + head * groups + start) * dim
            for i in range(count):
                row = q[begin + i * dim : begin + (i + 1) * dim]
                own = queries[i * padded : (i + 1) * padded]
                scale[i] = _load(row, np.float32(spec.scaling), dim, scaled, own)
            _score(count, queries, dim, padded, panels, at * panels_size, base, high, width, scores)
            for i in range(count):
                own = scores[i * width + low - base : i * width + high - base]
                magnitude, top = round_scores(own, scale[i], rounded)
                weigh(rounded, top, own)
                total[i] = sum_of(own)
                scale[i] = pow2_64(fold(own, own_scales) - LEFT_BITS)
                worst = max(worst, magnitude)
            _sum(count, scores, low - base, width, stored, (at * context + low) * padded, padded, terms, sums)
            for i in range(count):
                unit, whole = scale[i], total[i]
                row, result = sums[i * padded : i * padded + dim], out[begin + i * dim : begin + (i + 1) * dim]
                for d in range(dim):
                    result[d] = round_to_f32_plus_zero(row[d] * unit / whole)
                worst = max(worst, largest_bits(result.view(np.int32)))
    return worst
