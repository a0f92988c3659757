"""Parts of the kernels of attention: rows on grids, and tiles of scores, softmax weights and their gradients.

A tile holds BM queries and BN keys of one head of keys. Queries are rows: those of all heads that share the head of
keys, one head after the other. Weights and score gradients are computed again from their rows wherever they are
wanted, so no matrix of queries and keys lies in memory. Sums of products are two sums in float64 of the upper and the
lower part of the left operand, each exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ppo_repro.numerics.arithmetic.grid import CHUNK as EXACT_CHUNK
from ppo_repro.numerics.arithmetic.grid import DOT_BITS, LEFT_BITS, RIGHT_BITS, SPLIT_BITS
from ppo_repro.numerics.arithmetic.grid import WEIGHT_UNIT as UNIT
from ppo_repro.numerics.kernels.triton.functions import (
    ROUND64,
    exp,
    exponent_of_bits,
    magnitude_bits,
    pow2,
    round_limbs,
    to_int64,
)

SPLIT: tl.constexpr = tl.constexpr(SPLIT_BITS)
SPLIT_UNIT: tl.constexpr = tl.constexpr(2.0**SPLIT_BITS)
SPLIT_INVERSE: tl.constexpr = tl.constexpr(2.0**-SPLIT_BITS)
LEFT: tl.constexpr = tl.constexpr(LEFT_BITS)
RIGHT: tl.constexpr = tl.constexpr(RIGHT_BITS)
DOT: tl.constexpr = tl.constexpr(DOT_BITS)
DOT_LOWER: tl.constexpr = tl.constexpr((1 << DOT_BITS) - 1)
WEIGHT_UNIT: tl.constexpr = tl.constexpr(UNIT)
CHUNK = EXACT_CHUNK  # terms of one float64 with half of the left operand


@triton.jit
def put_rows(
    x, exponents, wide, narrow, scales, rows, dim,
    AS_LEFT: tl.constexpr, AS_RIGHT: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """R rows on grids: int32 of 25 bits as left operands, float32 of 24 and their scales as right ones; 0 beyond."""
    row, d = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, WIDTH)
    inside = row < rows
    value = tl.load(x + row[:, None] * dim + d[None, :], mask=inside[:, None] & (d < dim)[None, :], other=0.0)
    e = exponent_of_bits(tl.max(magnitude_bits(value), 1))
    tl.store(exponents + row, e, mask=inside)
    at = row[:, None] * WIDTH + d[None, :]
    if AS_LEFT:
        whole = to_int64(value.to(tl.float64) * pow2(-e + LEFT)[:, None])
        tl.store(wide + at, whole.to(tl.int32), mask=inside[:, None])
    if AS_RIGHT:
        whole = to_int64(value.to(tl.float64) * pow2(-e + RIGHT)[:, None])
        tl.store(narrow + at, whole.to(tl.float32), mask=inside[:, None])
        tl.store(scales + row, pow2(e - RIGHT).to(tl.float32), mask=inside)


@triton.jit
def row_dots(grad, out, dots, rows, dim, R: tl.constexpr, WIDTH: tl.constexpr):
    """sum_d grad[d] out[d] of R rows on grids of 25 and 26 bits, float64."""
    row, d = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (d < dim)[None, :]
    a = tl.load(grad + row[:, None] * dim + d[None, :], mask=inside, other=0.0)
    b = tl.load(out + row[:, None] * dim + d[None, :], mask=inside, other=0.0)
    up, right = exponent_of_bits(tl.max(magnitude_bits(a), 1)), exponent_of_bits(tl.max(magnitude_bits(b), 1))
    left = to_int64(a.to(tl.float64) * pow2(-up + LEFT)[:, None])
    terms = left * to_int64(b.to(tl.float64) * pow2(-right + DOT)[:, None])
    total = round_limbs(tl.sum(terms >> DOT, 1), tl.sum(terms & DOT_LOWER, 1), DOT)
    tl.store(dots + row, (total * pow2(up - LEFT)) * pow2(right - DOT), mask=row < rows)


@triton.jit
def reach_of(begin, end, head, row, rows, length, kv_heads, keys):
    """The keys first..last - 1 of some queries, int32 [BM]; none for rows beyond the last."""
    at = (head // kv_heads).to(tl.int64) * length + row % length
    first = tl.load(begin + at, mask=row < rows, other=0)
    return first, tl.minimum(tl.load(end + at, mask=row < rows, other=0), keys)


@triton.jit
def span_of(first, last, keys, BN: tl.constexpr):
    """Where the keys of some queries begin, at a multiple of BN, and end."""
    sees = first < last
    lowest = tl.min(tl.where(sees, first, keys), 0)
    return (lowest // BN) * BN, tl.max(tl.where(sees, last, 0), 0)


@triton.jit
def split(whole):
    """Integers in float64 as upper 2^13 + lower, both small enough for exact sums."""
    upper = (whole * SPLIT_INVERSE + ROUND64) - ROUND64
    return upper, whole - upper * SPLIT_UNIT


@triton.jit
def grid_integers(x, unit):
    """rne(x unit) in float64, below 2^51."""
    return (x * unit + ROUND64) - ROUND64


@triton.jit
def products(
    left, right, row, j, rows, keys, dim,
    PANEL: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """fl64(sum_d left[row, d] right[j, d]) of int32 rows and float32 ones, the sum exact; [BM, BN].

    PANEL > 0: the right ones lie transposed in panels of so many, [panels, dim, PANEL].
    """
    r, c = tl.minimum(row, rows - 1).to(tl.int64), tl.minimum(j, keys - 1).to(tl.int64)
    high, low = tl.zeros((BM, BN), dtype=tl.float64), tl.zeros((BM, BN), dtype=tl.float64)
    for s in range(0, WIDTH, BK):
        d = s + tl.arange(0, BK)
        a = tl.load(left + r[:, None] * WIDTH + d[None, :])
        if PANEL > 0:
            at = right + ((c // PANEL) * dim * PANEL + c % PANEL)[None, :] + d[:, None] * PANEL
            b = tl.load(at, mask=(d < dim)[:, None], other=0.0).to(tl.float64)
        else:
            b = tl.load(right + c[None, :] * WIDTH + d[:, None]).to(tl.float64)
        upper = a >> SPLIT
        high = tl.dot(upper.to(tl.float64), b, high, out_dtype=tl.float64)
        low = tl.dot((a - (upper << SPLIT)).to(tl.float64), b, low, out_dtype=tl.float64)
    return high * SPLIT_UNIT + low


@triton.jit
def scores_of(
    q, q_exponents, k, k_scales, row, j, rows, keys, dim,
    PANEL: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Scores [BM, BN] float32; keys in panels lie there with their scales multiplied in."""
    total = products(q, k, row, j, rows, keys, dim, PANEL, WIDTH, BM, BN, BK)
    total = total * pow2(tl.load(q_exponents + row, mask=row < rows, other=0) - LEFT)[:, None]
    if PANEL == 0:
        total = total * tl.load(k_scales + j, mask=j < keys, other=1.0).to(tl.float64)[None, :]
    return total.to(tl.float32) + 0.0


@triton.jit
def weights_of(scores, top, first, last, j):
    """Softmax weights [BM, BN] as integers in units of 2^-30, float64; 0 for keys out of reach."""
    seen = (j[None, :] >= first[:, None]) & (j[None, :] < last[:, None])
    shifted = tl.where(seen, scores - top[:, None], 0.0)
    return tl.where(seen, grid_integers(exp(shifted).to(tl.float64), WEIGHT_UNIT), 0.0)


@triton.jit
def score_gradients_of(
    grad, grad_exponents, v, v_scales, dots, shares, row, j, rows, keys,
    WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """(dp - delta) w of shares w, float64 [BM, BN]; dp_ij = grad_i v_j, delta_i = grad_i out_i."""
    dp = products(grad, v, row, j, rows, keys, WIDTH, 0, WIDTH, BM, BN, BK)
    dp = dp * pow2(tl.load(grad_exponents + row, mask=row < rows, other=0) - LEFT)[:, None]
    dp = dp * tl.load(v_scales + j, mask=j < keys, other=1.0).to(tl.float64)[None, :]
    return (dp - tl.load(dots + row, mask=row < rows, other=0.0)[:, None]) * shares
