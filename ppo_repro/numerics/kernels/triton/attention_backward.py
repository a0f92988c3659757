"""Gradients of attention: of queries over their keys, of keys and values over the queries that see them.

Each sum has a grid from its largest term, which a kernel of its own finds first.
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
    score_gradients_of,
    scores_of,
    span_of,
    split,
    weights_of,
)
from ppo_repro.numerics.kernels.triton.functions import exponent_of_bits, magnitude_bits, pow2, round_limbs


@triton.jit
def at_head(
    q, q_exponents, q_scales, k, k_scales, v, v_scales, grad, grad_exponents, grad_scales, tops, totals, dots,
    head, rows, keys, WIDTH: tl.constexpr,
):  # fmt: skip
    """The operands of one head of keys."""
    i, j = head * rows, head * keys
    return (
        q + i * WIDTH, q_exponents + i, q_scales + i, k + j * WIDTH, k_scales + j, v + j * WIDTH, v_scales + j,
        grad + i * WIDTH, grad_exponents + i, grad_scales + i, tops + i, totals + i, dots + i,
    )  # fmt: skip


@triton.jit
def terms_of(
    operands, row, first, last, j, rows, keys,
    KIND: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The left operand of a sum before it is put on its grid: of queries (0), keys (1) or values (2); [BM, BN]."""
    q, q_exponents, q_scales, k, k_scales, v, v_scales, grad, grad_exponents, grad_scales, tops, totals, dots = operands
    scores = scores_of(q, q_exponents, k, k_scales, row, j, rows, keys, WIDTH, 0, WIDTH, BM, BN, BK)
    weights = weights_of(scores, tl.load(tops + row, mask=row < rows, other=0.0), first, last, j)
    shares = weights / tl.load(totals + row, mask=row < rows, other=1.0)[:, None]
    if KIND == 2:
        return shares * tl.load(grad_scales + row, mask=row < rows, other=0.0).to(tl.float64)[:, None]
    else:
        ds = score_gradients_of(
            grad, grad_exponents, v, v_scales, dots, shares, row, j, rows, keys, WIDTH, BM, BN, BK
        )  # fmt: skip
        if KIND == 1:
            return ds * tl.load(q_scales + row, mask=row < rows, other=0.0).to(tl.float64)[:, None]
        else:
            return ds * tl.load(k_scales + j, mask=j < keys, other=0.0).to(tl.float64)[None, :]


@triton.jit
def query_grids(
    q, q_exponents, q_scales, k, k_scales, v, v_scales, grad, grad_exponents, grad_scales, tops, totals, dots,
    begin, end, exponents, rows, length, kv_heads, keys,
    WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The exponent of the largest term of each query's gradient."""
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(0) * BM + tl.arange(0, BM)
    operands = at_head(
        q, q_exponents, q_scales, k, k_scales, v, v_scales, grad, grad_exponents, grad_scales, tops, totals, dots,
        head, rows, keys, WIDTH,
    )  # fmt: skip
    first, last = reach_of(begin, end, head, row, rows, length, kv_heads, keys)
    start, stop = span_of(first, last, keys, BN)
    most = tl.zeros((BM,), dtype=tl.int64)
    for at in range(start, stop, BN):
        j = at + tl.arange(0, BN)
        terms = terms_of(operands, row, first, last, j, rows, keys, 0, WIDTH, BM, BN, BK)
        most = tl.maximum(most, tl.max(magnitude_bits(terms), 1))
    tl.store(exponents + head * rows + row, exponent_of_bits(most), mask=row < rows)


@triton.jit
def query_sums(
    operands, row, first, last, unit, column, start, stop, rows, keys,
    WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Upper and lower sums of terms and keys start..stop - 1, float64 [BM, BD]."""
    k = operands[3]
    high, low = tl.zeros((BM, BD), dtype=tl.float64), tl.zeros((BM, BD), dtype=tl.float64)
    for at in range(start, stop, BN):
        j = at + tl.arange(0, BN)
        terms = terms_of(operands, row, first, last, j, rows, keys, 0, WIDTH, BM, BN, BK)
        upper, lower = split(grid_integers(terms, unit[:, None]))
        key = tl.load(k + tl.minimum(j, keys - 1).to(tl.int64)[:, None] * WIDTH + column[None, :]).to(tl.float64)
        high = tl.dot(upper, key, high, out_dtype=tl.float64)
        low = tl.dot(lower, key, low, out_dtype=tl.float64)
    return high, low


@triton.jit
def query_gradients(
    q, q_exponents, q_scales, k, k_scales, v, v_scales, grad, grad_exponents, grad_scales, tops, totals, dots,
    begin, end, exponents, scaling, dq, rows, length, kv_heads, keys, dim,
    LONG: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dq[i, d] = scaling sum_j ds_ij k[j, d]."""
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(2) * BD + tl.arange(0, BD)
    operands = at_head(
        q, q_exponents, q_scales, k, k_scales, v, v_scales, grad, grad_exponents, grad_scales, tops, totals, dots,
        head, rows, keys, WIDTH,
    )  # fmt: skip
    first, last = reach_of(begin, end, head, row, rows, length, kv_heads, keys)
    start, stop = span_of(first, last, keys, BN)
    at = head * rows + row
    e = tl.load(exponents + at, mask=row < rows, other=0)
    unit = pow2(-e + LEFT)
    if LONG:
        above, below = tl.zeros((BM, BD), dtype=tl.int64), tl.zeros((BM, BD), dtype=tl.int64)
        for part in range(start, stop, CHUNK):
            until = tl.minimum(part + CHUNK, stop)
            high, low = query_sums(
                operands, row, first, last, unit, column, part, until, rows, keys, WIDTH, BM, BN, BK, BD
            )  # fmt: skip
            above += high.to(tl.int64)
            below += low.to(tl.int64)
        total = round_limbs(above, below, SPLIT)
    else:
        high, low = query_sums(
            operands, row, first, last, unit, column, start, stop, rows, keys, WIDTH, BM, BN, BK, BD
        )  # fmt: skip
        total = high * SPLIT_UNIT + low
    result = ((total * pow2(e - LEFT)[:, None]) * tl.load(scaling)).to(tl.float32) + 0.0
    tl.store(dq + at[:, None] * dim + column[None, :], result, mask=(row < rows)[:, None] & (column < dim)[None, :])


@triton.jit
def key_grids(
    q, q_exponents, q_scales, k, k_scales, v, v_scales, grad, grad_exponents, grad_scales, tops, totals, dots,
    begin, end, exponents, rows, length, kv_heads, keys,
    KIND: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The exponent of the largest term of each key's (1) or value's (2) gradient."""
    head, j = tl.program_id(1).to(tl.int64), tl.program_id(0) * BN + tl.arange(0, BN)
    operands = at_head(
        q, q_exponents, q_scales, k, k_scales, v, v_scales, grad, grad_exponents, grad_scales, tops, totals, dots,
        head, rows, keys, WIDTH,
    )  # fmt: skip
    most = tl.zeros((BN,), dtype=tl.int64)
    for at in range(0, rows, BM):
        row = at + tl.arange(0, BM)
        first, last = reach_of(begin, end, head, row, rows, length, kv_heads, keys)
        start, stop = span_of(first, last, keys, BN)
        if (start < (tl.program_id(0) + 1) * BN) & (stop > tl.program_id(0) * BN):
            terms = terms_of(operands, row, first, last, j, rows, keys, KIND, WIDTH, BM, BN, BK)
            most = tl.maximum(most, tl.max(magnitude_bits(terms), 0))
    tl.store(exponents + head * keys + j, exponent_of_bits(most), mask=j < keys)


@triton.jit
def key_sums(
    operands, right, begin, end, head, j, unit, column, start_row, stop_row, rows, length, kv_heads, keys,
    KIND: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Upper and lower sums of terms and right operands over some queries, float64 [BN, BD]."""
    high, low = tl.zeros((BN, BD), dtype=tl.float64), tl.zeros((BN, BD), dtype=tl.float64)
    for at in range(start_row, stop_row, BM):
        row = at + tl.arange(0, BM)
        first, last = reach_of(begin, end, head, row, rows, length, kv_heads, keys)
        start, stop = span_of(first, last, keys, BN)
        if (start < (tl.program_id(0) + 1) * BN) & (stop > tl.program_id(0) * BN):
            terms = terms_of(operands, row, first, last, j, rows, keys, KIND, WIDTH, BM, BN, BK)
            upper, lower = split(grid_integers(terms, unit[None, :]))
            source = right + (head * rows + tl.minimum(row, rows - 1))[:, None] * WIDTH + column[None, :]
            value = tl.load(source).to(tl.float64)
            high = tl.dot(tl.trans(upper), value, high, out_dtype=tl.float64)
            low = tl.dot(tl.trans(lower), value, low, out_dtype=tl.float64)
    return high, low


@triton.jit
def key_gradients(
    q, q_exponents, q_scales, k, k_scales, v, v_scales, grad, grad_exponents, grad_scales, tops, totals, dots,
    right, begin, end, exponents, gradient, rows, length, kv_heads, keys, dim,
    KIND: tl.constexpr, LONG: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dk[j, d] = sum_i ds_ij q[i, d] (1), dv[j, d] = sum_i w_ij grad[i, d] (2); `right` are those on 24 bits."""
    head, j = tl.program_id(1).to(tl.int64), tl.program_id(0) * BN + tl.arange(0, BN)
    column = tl.program_id(2) * BD + tl.arange(0, BD)
    operands = at_head(
        q, q_exponents, q_scales, k, k_scales, v, v_scales, grad, grad_exponents, grad_scales, tops, totals, dots,
        head, rows, keys, WIDTH,
    )  # fmt: skip
    e = tl.load(exponents + head * keys + j, mask=j < keys, other=0)
    unit = pow2(-e + LEFT)
    if LONG:
        above, below = tl.zeros((BN, BD), dtype=tl.int64), tl.zeros((BN, BD), dtype=tl.int64)
        for part in range(0, rows, CHUNK):
            high, low = key_sums(
                operands, right, begin, end, head, j, unit, column, part, tl.minimum(part + CHUNK, rows),
                rows, length, kv_heads, keys, KIND, WIDTH, BM, BN, BK, BD,
            )  # fmt: skip
            above += high.to(tl.int64)
            below += low.to(tl.int64)
        total = round_limbs(above, below, SPLIT)
    else:
        high, low = key_sums(
            operands, right, begin, end, head, j, unit, column, 0, rows,
            rows, length, kv_heads, keys, KIND, WIDTH, BM, BN, BK, BD,
        )  # fmt: skip
        total = high * SPLIT_UNIT + low
    result = (total * pow2(e - LEFT)[:, None]).to(tl.float32) + 0.0
    at = gradient + (head * keys + j)[:, None] * dim + column[None, :]
    tl.store(at, result, mask=(j < keys)[:, None] & (column < dim)[None, :])
