"""Compute rule 1, the product: y[m, n] = sum_k x[m, k] w[n, k] in chains of 128 terms.

Rules 2 and 4 use the same chains. A chain ends at -0 if a negative product underflows, but no y is -0, because the
first chain is added to +0. So a kernel may leave out a term that is zero, and padding, masked keys and ragged tiles
change no bit.
"""

from __future__ import annotations

import numpy as np

from ppo_repro.numerics.definition.elementary import Array, F, fma

BLOCK = 128  # terms of a chain


def chain(x: Array, w: Array) -> Array:
    """Compute one chain: acc = fma(x[.., m, k], w[.., n, k], acc) from +0 by rising k.

    [.., M, K], [.., N, K] -> [.., M, N].
    """
    acc = np.zeros((*x.shape[:-1], w.shape[-2]), F)
    for k in range(x.shape[-1]):
        acc = fma(x[..., :, None, k], w[..., None, :, k], acc)
    return acc


def product(x: Array, w: Array) -> Array:
    """Compute rule 1: y = y + chain of each 128 terms, in order from y = +0.

    [.., M, K], [.., N, K] -> [.., M, N]. Kernel: `linear`.
    """
    y = np.zeros((*x.shape[:-1], w.shape[-2]), F)
    for start in range(0, x.shape[-1], BLOCK):
        k = slice(start, start + BLOCK)
        y = y + chain(x[..., k], w[..., k])
    return y
