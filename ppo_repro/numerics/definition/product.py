"""Compute rule 1, the product: y[m, n] = sum_k x[m, k] w[n, k] in blocks of 128 terms.

Rules 2 and 4 use the same blocks. In precision `highest` a block is a chain, which ends at -0 if a negative product
underflows; in `high` it is an exact sum of integers. No y is -0, because the first block is added to +0. So a kernel
may leave out a term that is zero, and padding, masked keys and ragged tiles change no bit.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from ppo_repro.numerics.definition.elementary import Array, D, F, fma, quiet

Precision = Literal["highest", "high"]
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
def integers(x: Array) -> tuple[Array, Array]:
    """Return X = clip(rint(x 2^s), -4095, 4095), ties to even, float64 [.., n]; and 2^-s, float32 [.., 1].

    2^s brings the largest |x| of a row into [2048, 4096), but s is at most 63. A row with a NaN, or with a number of
    2^60 or above, has the scale NaN. Kernels: `integer_row`, `integer_columns`.
    """
    largest = np.abs(x).max(-1, keepdims=True)
    s = np.minimum(12 - np.frexp(largest)[1], 63)
    scale = np.where(largest < 2.0**60, np.ldexp(F(1), -s), F(np.nan))
    return np.clip(np.rint(np.ldexp(x.astype(D), s)), -4095, 4095), scale


@quiet
def exact(x: Array, w: Array) -> Array:
    """Compute float32(sum_k X[.., m, k] W[.., n, k]) 2^-sx 2^-sw, whose sum of integers is exact in any order.

    At most 128 terms: then |sum| < 2^31, and the product with the scales is exact. [.., M, K], [.., N, K] ->
    [.., M, N].
    """
    (x, x_scale), (w, w_scale) = integers(x), integers(w)
    return (x @ w.swapaxes(-1, -2)).astype(F) * (x_scale * w_scale.swapaxes(-1, -2))


def block_sum(x: Array, w: Array, precision: Precision) -> Array:
    """Compute the sum of one block of at most 128 terms; [.., M, K], [.., N, K] -> [.., M, N]."""
    return exact(x, w) if precision == "high" else chain(x, w)


def product(x: Array, w: Array, precision: Precision = "highest") -> Array:
    """Compute rule 1: y = y + sum of each block, in order from y = +0.

    [.., M, K], [.., N, K] -> [.., M, N]. Kernel: `linear`.
    """
    y = np.zeros((*x.shape[:-1], w.shape[-2]), F)
    for start in range(0, x.shape[-1], BLOCK):
        k = slice(start, start + BLOCK)
        y = y + block_sum(x[..., k], w[..., k], precision)
    return y
