"""Compute rule 1, the product: y[m, n] = sum_k x[m, k] w[n, k] in blocks of 128 terms.

Rules 2 and 4 use the same blocks. In precision `highest` a block is a chain, which ends at -0 if a negative product
underflows. In `high` a block is an exact sum of integers, and of their remainders beside outliers. No y is -0, because
the first block is added to +0. So a kernel may leave out a term that is zero, and padding, masked keys and ragged tiles
change no bit.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from ppo_repro.numerics.definition.elementary import Array, D, F, fma, quiet

Precision = Literal["highest", "high"]
Asked = Literal["x and w", "w", "none"]  # whose blocks need remainders in `high`, if they are mostly small
BLOCK = 128  # terms of a chain, and of an exact sum


def chain(x: Array, w: Array) -> Array:
    """Compute one chain: acc = fma(x[.., m, k], w[.., n, k], acc) from +0 by rising k.

    [.., M, K], [.., N, K] -> [.., M, N].
    """
    acc = np.zeros((*x.shape[:-1], w.shape[-2]), F)
    for k in range(x.shape[-1]):
        acc = fma(x[..., :, None, k], w[..., None, :, k], acc)
    return acc


@quiet
def integers(x: Array) -> tuple[Array, Array, Array, Array]:
    """Return for each row the integers X, the remainders X', the scale 2^-s, and whether the row is mostly small.

    X = clip(rint(x 2^s), -4095, 4095), ties to even, and X' = rint((x 2^s - X) 2^11), both float64 [.., n]; 2^-s is
    float32 [.., 1]. A row is mostly small if more than half of its numbers are not zero and have |X| < 32. |X'| is at
    most 2^11, because x 2^s - X is below 1.

    2^s brings the largest |x| of a row into [2048, 4096), but s is at most 63. A row with a NaN, or with a number of
    2^60 or above, has the scale NaN, and any X'. Kernels: `integer_row`, `integer_columns`.
    """
    largest = np.abs(x).max(-1, keepdims=True)
    s = np.minimum(12 - np.frexp(largest)[1], 63)
    scale = np.where(largest < 2.0**60, np.ldexp(F(1), -s), F(np.nan))
    exact = np.ldexp(x.astype(D), s)
    whole = np.clip(np.rint(exact), -4095, 4095)
    small = 2 * ((np.abs(whole) < 32) & (x != 0)).sum(-1, keepdims=True) > x.shape[-1]
    return whole, np.rint((exact - whole) * 2**11), scale, small


@quiet
def exact(x: Array, w: Array, asked: Asked) -> Array:
    """Compute float32(sum_k X[.., m, k] W[.., n, k]) 2^-sx 2^-sw, whose sum of integers is exact in any order.

    If the row of w, or of x if it is `asked`, is mostly small, add float32(sum_k X W' + X' W) 2^-sx 2^-sw 2^-11. At
    most 128 terms: then |sum| < 2^31, and products with the scales are exact. [.., M, K], [.., N, K] -> [.., M, N].
    """
    (x, x_rest, x_scale, x_small), (w, w_rest, w_scale, w_small) = (integers(x), integers(w))
    w, w_rest, w_scale, w_small = (a.swapaxes(-1, -2) for a in (w, w_rest, w_scale, w_small))
    needed = (x_small & (asked == "x and w")) | (w_small & (asked != "none"))
    scale = x_scale * w_scale
    block = (x @ w).astype(F) * scale
    return np.where(needed, block + (x @ w_rest + x_rest @ w).astype(F) * (scale * F(2.0**-11)), block)


def block_sum(x: Array, w: Array, precision: Precision, asked: Asked) -> Array:
    """Compute the sum of one block of at most 128 terms; [.., M, K], [.., N, K] -> [.., M, N]."""
    return exact(x, w, asked) if precision == "high" else chain(x, w)


def product(x: Array, w: Array, precision: Precision = "highest", asked: Asked = "x and w") -> Array:
    """Compute rule 1: y = y + sum of each block, in order from y = +0.

    [.., M, K], [.., N, K] -> [.., M, N]. `asked` is "w" if x is a gradient. Kernel: `linear`.
    """
    y = np.zeros((*x.shape[:-1], w.shape[-2]), F)
    for start in range(0, x.shape[-1], BLOCK):
        k = slice(start, start + BLOCK)
        y = y + block_sum(x[..., k], w[..., k], precision, asked)
    return y
