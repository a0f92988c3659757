"""Attention forward, over a batch or over a cache, in three passes over the keys and two kernels.

The grid of the folded weights of a query needs their largest before any is rounded. So the first kernel finds the
largest score, then the sum of the weights and that grid; the second multiplies the weights with the values. An online
softmax, which rescales what it has summed, would round otherwise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ppo_repro.numerics.kernels.triton.attention_tiles import (
    LEFT,
    SPLIT,
    SPLIT_UNIT,
    grid_integers,
    reach_of,
    scores_of,
    span_of,
    split,
    weights_of,
)
from ppo_repro.numerics.kernels.triton.functions import exponent_of_bits, magnitude_bits, pow2, round_limbs


@triton.jit
def softmax_sums(
    q, q_exponents, k, k_scales, v_scales, places, begin, end, tops, totals, exponents, largest,
    rows, length, kv_heads, keys, key_size, dim,
    PANEL: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Of each query: largest score, sum of weights, exponent of the folded weights, bits of the largest |score|."""
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(0) * BM + tl.arange(0, BM)
    place = tl.load(places + head)
    q, q_exponents = q + head * rows * WIDTH, q_exponents + head * rows
    k, k_scales, v_scales = k + place * key_size, k_scales + place * keys, v_scales + place * keys
    first, last = reach_of(begin, end, head, row, rows, length, kv_heads, keys)
    low, high = span_of(first, last, keys, BN)
    top, bits = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), dtype=tl.int32)
    for start in range(low, high, BN):
        j = start + tl.arange(0, BN)
        scores = scores_of(q, q_exponents, k, k_scales, row, j, rows, keys, dim, PANEL, WIDTH, BM, BN, BK)
        seen = (j[None, :] >= first[:, None]) & (j[None, :] < last[:, None])
        bits = tl.maximum(bits, tl.max(tl.where(seen, magnitude_bits(scores), 0), 1))
        top = tl.maximum(top, tl.max(tl.where(seen, scores, float("-inf")), 1))
    top = tl.where(first < last, top, 0.0)
    total, most = tl.zeros((BM,), dtype=tl.float64), tl.zeros((BM,), dtype=tl.float64)
    for start in range(low, high, BN):
        j = start + tl.arange(0, BN)
        scores = scores_of(q, q_exponents, k, k_scales, row, j, rows, keys, dim, PANEL, WIDTH, BM, BN, BK)
        weights = weights_of(scores, top, first, last, j)
        total += tl.sum(weights, 1)
        scale = tl.load(v_scales + j, mask=j < keys, other=0.0).to(tl.float64)
        most = tl.maximum(most, tl.max(weights * scale[None, :], 1))
    at = head * rows + row
    tl.store(tops + at, top, mask=row < rows)
    tl.store(totals + at, tl.where(total > 0.0, total, 1.0), mask=row < rows)
    tl.store(exponents + at, exponent_of_bits(magnitude_bits(most)), mask=row < rows)
    tl.store(largest + at, bits, mask=row < rows)


@triton.jit
def value_sums(
    q, q_exponents, k, k_scales, v, v_scales, row, first, last, top, unit, column, begin, end, rows, keys, dim, v_row,
    PANEL: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Upper and lower sums of folded weights and values over keys begin..end - 1, float64 [BM, BD]."""
    high, low = tl.zeros((BM, BD), dtype=tl.float64), tl.zeros((BM, BD), dtype=tl.float64)
    for start in range(begin, end, BN):
        j = start + tl.arange(0, BN)
        scores = scores_of(q, q_exponents, k, k_scales, row, j, rows, keys, dim, PANEL, WIDTH, BM, BN, BK)
        weights = weights_of(scores, top, first, last, j)
        scale = tl.load(v_scales + j, mask=j < keys, other=0.0).to(tl.float64)
        upper, lower = split(grid_integers(weights * scale[None, :], unit[:, None]))
        at = v + j.to(tl.int64)[:, None] * v_row + column[None, :]
        value = tl.load(at, mask=(j < keys)[:, None] & (column < dim)[None, :], other=0.0).to(tl.float64)
        high = tl.dot(upper, value, high, out_dtype=tl.float64)
        low = tl.dot(lower, value, low, out_dtype=tl.float64)
    return high, low


@triton.jit
def weighted_values(
    q, q_exponents, k, k_scales, v, v_scales, places, begin, end, tops, totals, exponents, out,
    rows, length, kv_heads, keys, key_size, value_size, v_row, dim,
    LONG: tl.constexpr, CHUNK: tl.constexpr, PANEL: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out[i, d] = sum_j w_ij v[j, d] / sum_j w_ij; LONG: more than CHUNK keys, which two float64 do not hold."""
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(2) * BD + tl.arange(0, BD)
    place = tl.load(places + head)
    q, q_exponents = q + head * rows * WIDTH, q_exponents + head * rows
    k, k_scales = k + place * key_size, k_scales + place * keys
    v, v_scales = v + place * value_size, v_scales + place * keys
    first, last = reach_of(begin, end, head, row, rows, length, kv_heads, keys)
    at, inside = head * rows + row, row < rows
    top, e = tl.load(tops + at, mask=inside, other=0.0), tl.load(exponents + at, mask=inside, other=0)
    start, stop = span_of(first, last, keys, BN)
    unit = pow2(-e + LEFT)
    if LONG:
        above, below = tl.zeros((BM, BD), dtype=tl.int64), tl.zeros((BM, BD), dtype=tl.int64)
        for part in range(start, stop, CHUNK):
            high, low = value_sums(
                q, q_exponents, k, k_scales, v, v_scales, row, first, last, top, unit, column,
                part, tl.minimum(part + CHUNK, stop), rows, keys, dim, v_row, PANEL, WIDTH, BM, BN, BK, BD,
            )  # fmt: skip
            above += high.to(tl.int64)
            below += low.to(tl.int64)
        summed = round_limbs(above, below, SPLIT)
    else:
        high, low = value_sums(
            q, q_exponents, k, k_scales, v, v_scales, row, first, last, top, unit, column,
            start, stop, rows, keys, dim, v_row, PANEL, WIDTH, BM, BN, BK, BD,
        )  # fmt: skip
        summed = high * SPLIT_UNIT + low
    total = tl.load(totals + at, mask=inside, other=1.0)
    result = ((summed * pow2(e - LEFT)[:, None]) / total[:, None]).to(tl.float32) + 0.0
    tl.store(out + at[:, None] * dim + column[None, :], result, mask=inside[:, None] & (column < dim)[None, :])
