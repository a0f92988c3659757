"""Root-mean-square norm, forward and backward, row by row while a row is in the cache.

Sums over a row are sums of integers, exact in every order; all else is rounded as in the eager code.
"""

from __future__ import annotations

import numpy as np

from ppo_repro.numerics.arithmetic.grid import DOT_BITS
from ppo_repro.numerics.kernels.core.compile import kernel, kernel_part
from ppo_repro.numerics.kernels.core.pool import results_of_parts
from ppo_repro.numerics.kernels.core.rows import largest_bits, largest_bits_64, scaled_dot, sum_of_squares
from ppo_repro.numerics.kernels.core.scalar import (
    INFINITY_BITS,
    INFINITY_BITS_64,
    exponent32,
    exponent64,
    pow2_32,
    pow2_64,
)

# in place of the largest exponent of a gradient's contributions
NOT_FINITE = 1 << 30
NO_GRID = -(1 << 30)  # there is no contribution; as the exponent of a grid: no contribution fits


@kernel_part
def add_row(row, grid, unit, sums):  # type: ignore[no-untyped-def]
    """sums += rne(row unit), float64 to int64, if max |row| < 2^grid. Does nothing if `sums` is empty.

    Returns the exponent of the row, NO_GRID for a row of zeros or empty sums.
    """
    if sums.size == 0:
        return np.int64(NO_GRID)
    largest = largest_bits_64(row)
    if largest == 0:
        return np.int64(NO_GRID)
    e = exponent64(largest)
    if e <= grid:
        for c in range(row.size):
            sums[c] += np.int64(np.rint(row[c] * unit))
    return e


@kernel
def rms_norm_rows(x, bits, weight, eps, first, last, inverse, y):  # type: ignore[no-untyped-def]
    """Rows first..last-1 of `rms_norm`, flat; `bits` are those of x. Returns whether they are finite."""
    size = weight.size
    finite = True
    for r in range(first, last):
        row, out = x[r * size : r * size + size], y[r * size : r * size + size]
        largest = largest_bits(bits[r * size : r * size + size])
        finite &= largest < INFINITY_BITS
        e = exponent32(largest)
        down = pow2_64(e - DOT_BITS)
        mean_square = sum_of_squares(row, pow2_32(DOT_BITS - e)) * (down * down) / size
        scale = 1.0 / np.sqrt(mean_square + eps)
        inverse[r] = scale
        for c in range(size):
            out[c] = np.float32((np.float64(row[c]) * scale) * np.float64(weight[c]))
    return finite


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, inverse: np.ndarray, y: np.ndarray) -> bool:
    """y = w x inverse, inverse = 1 / sqrt(mean(x^2) + eps); x, y [T, H] float32, inverse [T] float64.

    The weight [H] is float32 where it is a parameter, float64 where it is computed from one.
    Returns False if x holds an infinity or NaN.
    """
    rows, size = x.shape
    flat, out = x.reshape(-1), y.reshape(-1)
    bits = flat.view(np.int32)
    finite = results_of_parts(lambda i, j: rms_norm_rows(flat, bits, weight, eps, i, j, inverse, out), rows, 1.5 * size)
    return all(finite)


@kernel
def backward_rows(grad, x, weight, inverse, first, last, dx, grid, unit, sums):  # type: ignore[no-untyped-def]
    """Rows first..last-1 of `rms_norm_backward`, flat. Returns the largest exponent of a row's contributions."""
    size = weight.size
    finite = True
    normed, weighted, contribution = np.empty(size), np.empty(size), np.empty(size)
    top = np.int64(NO_GRID)
    for r in range(first, last):
        dy, row, out = (
            grad[r * size : r * size + size],
            x[r * size : r * size + size],
            dx[r * size : r * size + size],
        )
        scale = inverse[r]
        for c in range(size):
            d = np.float64(dy[c])
            normed[c] = np.float64(row[c]) * scale
            weighted[c] = d * np.float64(weight[c])
            contribution[c] = d * normed[c]
        largest = largest_bits_64(weighted)
        largest_normed = largest_bits_64(normed)  # not finite for a row of zeros where eps is 0
        finite &= max(largest, largest_normed) < INFINITY_BITS_64
        a, b = exponent64(largest), exponent64(largest_normed)
        dot = scaled_dot(weighted, pow2_64(DOT_BITS - a), normed, pow2_64(DOT_BITS - b))
        dot = dot * (pow2_64(a - DOT_BITS) * pow2_64(b - DOT_BITS)) / size
        for c in range(size):
            out[c] = np.float32((weighted[c] - normed[c] * dot) * scale)
        top = max(top, add_row(contribution, grid, unit, sums))
    return top if finite else NOT_FINITE


def rms_norm_backward(
    grad: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    inverse: np.ndarray,
    dx: np.ndarray,
    grid: int,
    unit: float,
    sums: np.ndarray,
) -> int:
    """dx, and the integer gradient of the weight: sums [H] int64 += rne(dy x inverse unit) over rows.

    A row whose largest contribution is 2^grid or more is left out: the step will be redone. Empty `sums`: no gradient
    is wanted. Returns the largest exponent of any row's contributions, NO_GRID if there is none, or NOT_FINITE.
    """
    rows, size = x.shape

    def run(first: int, last: int) -> tuple[int, np.ndarray]:
        own_sums = np.zeros_like(sums)
        top = backward_rows(
            grad.reshape(-1), x.reshape(-1), weight, inverse, first, last, dx.reshape(-1), grid, unit, own_sums
        )
        return int(top), own_sums

    results = results_of_parts(run, rows, 6.0 * size)
    for _, own_sums in results:
        sums += own_sums
    return max((top for top, _ in results), default=NO_GRID)
