"""Products of rows on grids: 8-bit digits in int32, or halves in float64, scaled and rounded in the same kernel.

A sum of digit products is sum_l 2^(8 l) L_l with one int32 for each level l = i + j of digits i and j. The levels are
added in int64, exactly, rounded once to float64, scaled by powers of two and rounded once to float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic.grid import CHUNK as EXACT_CHUNK
from ppo_repro.numerics.arithmetic.grid import MAX_TERMS, SPLIT_BITS
from ppo_repro.numerics.kernels.triton.functions import exponent_of_bits, magnitude_bits, pow2, round_limbs
from ppo_repro.numerics.kernels.triton.launch import WARPS4, WARPS8, rows_of_a_tile
from ppo_repro.numerics.kernels.triton.operands import Rows

SPLIT: tl.constexpr = tl.constexpr(SPLIT_BITS)
CHUNK: tl.constexpr = tl.constexpr(EXACT_CHUNK)


@triton.jit
def digit_sums(a, b, a_rows, b_rows, i, j, first, last, padded, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """sum_k A[i, k] B[j, k] of four and three digits over columns first..last-1, int64 [BM, BN]."""
    k = tl.arange(0, BK)
    a_at = a + (i % a_rows).to(tl.int64)[:, None] * padded + k[None, :]
    b_at = b + (j % b_rows).to(tl.int64)[None, :] * padded + k[:, None]
    a_plane, b_plane = a_rows.to(tl.int64) * padded, b_rows.to(tl.int64) * padded
    zero = tl.zeros((BM, BN), dtype=tl.int32)
    l0, l1, l2, l3, l4, l5 = zero, zero, zero, zero, zero, zero
    for s in range(first, last, BK):
        b0, b1, b2 = tl.load(b_at + s), tl.load(b_at + b_plane + s), tl.load(b_at + 2 * b_plane + s)
        digit = tl.load(a_at + s)
        l0 = tl.dot(digit, b0, l0, out_dtype=tl.int32)
        l1 = tl.dot(digit, b1, l1, out_dtype=tl.int32)
        l2 = tl.dot(digit, b2, l2, out_dtype=tl.int32)
        digit = tl.load(a_at + a_plane + s)
        l1 = tl.dot(digit, b0, l1, out_dtype=tl.int32)
        l2 = tl.dot(digit, b1, l2, out_dtype=tl.int32)
        l3 = tl.dot(digit, b2, l3, out_dtype=tl.int32)
        digit = tl.load(a_at + 2 * a_plane + s)
        l2 = tl.dot(digit, b0, l2, out_dtype=tl.int32)
        l3 = tl.dot(digit, b1, l3, out_dtype=tl.int32)
        l4 = tl.dot(digit, b2, l4, out_dtype=tl.int32)
        digit = tl.load(a_at + 3 * a_plane + s)
        l3 = tl.dot(digit, b0, l3, out_dtype=tl.int32)
        l4 = tl.dot(digit, b1, l4, out_dtype=tl.int32)
        l5 = tl.dot(digit, b2, l5, out_dtype=tl.int32)
    total = l5.to(tl.int64)
    total = (total << 8) + l4.to(tl.int64)
    total = (total << 8) + l3.to(tl.int64)
    total = (total << 8) + l2.to(tl.int64)
    total = (total << 8) + l1.to(tl.int64)
    return (total << 8) + l0.to(tl.int64)


@triton.jit
def half_sums(a, b, a_rows, b_rows, i, j, padded, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """fl64(sum_k A[i, k] B[j, k]) of int32 integers by two sums in float64, those of 2^16 terms exact; [BM, BN]."""
    a_at = a + (i % a_rows).to(tl.int64)[:, None] * padded
    b_at = b + (j % b_rows).to(tl.int64)[None, :] * padded
    above, below = tl.zeros((BM, BN), dtype=tl.int64), tl.zeros((BM, BN), dtype=tl.int64)
    for start in range(0, padded, CHUNK):
        high, low = tl.zeros((BM, BN), dtype=tl.float64), tl.zeros((BM, BN), dtype=tl.float64)
        for s in range(start, tl.minimum(start + CHUNK, padded), BK):
            k = s + tl.arange(0, BK)
            left, right = tl.load(a_at + k[None, :]), tl.load(b_at + k[:, None]).to(tl.float64)
            upper = left >> SPLIT
            high = tl.dot(upper.to(tl.float64), right, high, out_dtype=tl.float64)
            low = tl.dot((left - (upper << SPLIT)).to(tl.float64), right, low, out_dtype=tl.float64)
        above += high.to(tl.int64)
        below += low.to(tl.int64)
    return round_limbs(above, below, SPLIT)


@triton.jit
def product(
    a, b, a_exponents, b_exponents, bias, y, a_rows, b_rows, padded, bits,
    AS_DIGITS: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[i, j] = fl32(fl64(sum_k A[i, k] B[j, k]) 2^(e_i + e_j - bits)) + 0 [+ bias[j]]."""
    i, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    if AS_DIGITS:
        total = digit_sums(a, b, a_rows, b_rows, i, j, 0, padded, padded, BM, BN, BK).to(tl.float64)
    else:
        total = half_sums(a, b, a_rows, b_rows, i, j, padded, BM, BN, BK)
    up = tl.load(a_exponents + i, mask=i < a_rows, other=0)
    right = tl.load(b_exponents + j, mask=j < b_rows, other=0)
    # a product with two powers of two has the bits of one with each after the other: float64 holds all of them
    out = (total * pow2(up[:, None] + right[None, :] - bits)).to(tl.float32) + 0.0
    if HAS_BIAS:
        out = out + tl.load(bias + j, mask=j < b_rows, other=0.0)[None, :]
    at = y + i.to(tl.int64)[:, None] * b_rows + j[None, :]
    tl.store(at, out, mask=(i < a_rows)[:, None] & (j < b_rows)[None, :])


@triton.jit
def add_outliers(
    x, w, x_row, x_column, w_row, w_column, x_exponents, x_outliers, w_outliers, x_counts, w_counts,
    x_width, w_width, most_x, most_w, y, x_rows, w_rows, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """y[m, n] += the products with an outlier, in float64: of x by rising column, then of w the others."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    in_x, in_w = m < x_rows, n < w_rows
    x_at, w_at = x + m.to(tl.int64)[:, None] * x_row, w + n.to(tl.int64)[None, :] * w_row
    total = tl.zeros((BM, BN), dtype=tl.float64)
    found = tl.load(x_counts + m, mask=in_x, other=0)
    for t in range(0, most_x):
        live = t < found
        k = tl.load(x_outliers + m * x_width + t, mask=live, other=0).to(tl.int64)[:, None]
        left = tl.load(x_at + k * x_column, mask=live[:, None], other=0.0)
        right = tl.load(w_at + k * w_column, mask=live[:, None] & in_w[None, :], other=0.0)
        total += left.to(tl.float64) * right.to(tl.float64)
    found = tl.load(w_counts + n, mask=in_w, other=0)
    top = tl.load(x_exponents + m, mask=in_x, other=0)[:, None]
    for t in range(0, most_w):
        live = t < found
        k = tl.load(w_outliers + n * w_width + t, mask=live, other=0).to(tl.int64)[None, :]
        left = tl.load(x_at + k * x_column, mask=live[None, :] & in_x[:, None], other=0.0)
        left = tl.where(exponent_of_bits(magnitude_bits(left)) > top, 0.0, left)  # added above
        right = tl.load(w_at + k * w_column, mask=live[None, :], other=0.0)
        total += left.to(tl.float64) * right.to(tl.float64)
    at = y + m.to(tl.int64)[:, None] * w_rows + n[None, :]
    inside = in_x[:, None] & in_w[None, :]
    tl.store(at, (tl.load(at, mask=inside, other=0.0).to(tl.float64) + total).to(tl.float32), mask=inside)


def linear(x: Rows, w: Rows, bias: Tensor | None) -> Tensor:
    """`contraction.linear` of prepared rows: x [M, K], w [N, K], bias [N] -> float32 [M, N].

    NumericsError for more than 2^20 terms.
    """
    (m, terms), n = x.values.shape, len(w.values)
    if terms > MAX_TERMS:
        raise NumericsError(f"a sum of {terms} products; at most {MAX_TERMS} are exact")
    y = torch.empty(m, n, dtype=torch.float32, device=x.values.device)
    a, b = (rows.integers if rows.digits is None else rows.digits for rows in (x, w))
    assert a is not None and b is not None
    block_m, block_n, block_k = blocks(x.values, x.digits is not None)
    product[(-(-m // block_m), -(-n // block_n))](
        a, b, x.exponents, w.exponents, y if bias is None else bias, y, m, n, a.shape[-1], x.bits + w.bits,
        AS_DIGITS=x.digits is not None, HAS_BIAS=bias is not None, BM=block_m, BN=block_n, BK=block_k,
        # with four, six sums of 64 x 64 would not fit into registers
        **(WARPS8 if x.digits is not None and block_m > 16 else WARPS4),
    )  # fmt: skip
    if x.most or w.most:
        add_outliers[(-(-m // 32), -(-n // 32))](
            x.values, w.values, *x.values.stride(), *w.values.stride(), x.exponents,
            x.outliers, w.outliers, x.counts, w.counts, x.outliers.shape[1], w.outliers.shape[1], x.most, w.most,
            y, m, n, BM=32, BN=32, **WARPS4,
        )  # fmt: skip
    return y


def blocks(x: Tensor, as_digits: bool) -> tuple[int, int, int]:
    """How many rows of x, columns and terms a program takes."""
    if not as_digits:
        return 32, 32, 16
    return 16 if len(x) <= 16 else rows_of_a_tile(x), 64, 64
