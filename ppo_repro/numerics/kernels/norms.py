"""Root-mean-square norm, forward and backward, one pass over each row while it is in the cache."""

from __future__ import annotations

import numpy as np

from ppo_repro.numerics.kernels.core.compile import exact_sum, kernel
from ppo_repro.numerics.kernels.core.pool import in_parts
from ppo_repro.numerics.kernels.core.rows import INFINITY_BITS, largest_bits
from ppo_repro.numerics.kernels.core.scalar import exponent32, exponent64, pow2_64

INFINITY_BITS_64 = np.int64(0x7FF << 52)
NOT_FINITE = 1 << 30
NO_GRID = -(1 << 30)  # no contribution fits


@exact_sum
def sum_of_squares(row, up):  # type: ignore[no-untyped-def]
    """sum rne(row up)^2: integers below 2^53 in every order."""
    total = 0.0
    for c in range(row.size):
        a = np.rint(np.float64(row[c]) * up)
        total += a * a
    return total


@exact_sum
def dot_of(a, a_up, b, b_up):  # type: ignore[no-untyped-def]
    """sum rne(a a_up) rne(b b_up) of float64 rows: integers below 2^53 in every order."""
    total = 0.0
    for c in range(a.size):
        total += np.rint(a[c] * a_up) * np.rint(b[c] * b_up)
    return total


@kernel
def largest64(row):  # type: ignore[no-untyped-def]
    """Bits of the largest magnitude of a float64 row; NaN above infinity."""
    bits = row.view(np.int64)
    largest = np.int64(0)
    for c in range(bits.size):
        largest = max(largest, bits[c] & np.int64(0x7FFFFFFFFFFFFFFF))
    return largest


@kernel
def add_row(row, grid, unit, sums):  # type: ignore[no-untyped-def]
    """sums += rne(row unit), float64 onto int64, if max |row| < 2^grid; nothing is added to empty sums.

    Returns the exponent of the row, NO_GRID for zeros and where there are no sums.
    """
    if sums.size == 0:
        return np.int64(NO_GRID)
    largest = largest64(row)
    if largest == 0:
        return np.int64(NO_GRID)
    e = exponent64(largest)
    if e <= grid:
        for c in range(row.size):
            sums[c] += np.int64(np.rint(row[c] * unit))
    return e


@kernel
def rms_norm_rows(x, bits, weight, eps, p, first, last, inverse, y):  # type: ignore[no-untyped-def]
    size = weight.size
    finite = True
    for r in range(first, last):
        row, out = x[r * size : r * size + size], y[r * size : r * size + size]
        largest = largest_bits(bits[r * size : r * size + size])
        finite &= largest < INFINITY_BITS
        e = exponent32(largest)
        down = pow2_64(e - p)
        mean_square = sum_of_squares(row, pow2_64(p - e)) * (down * down) / size
        scale = 1.0 / np.sqrt(mean_square + eps)
        inverse[r] = scale
        for c in range(size):
            out[c] = np.float32((np.float64(row[c]) * scale) * np.float64(weight[c]))
    return finite


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, p: int, inverse: np.ndarray, y: np.ndarray) -> bool:
    """y = w x inverse, inverse = 1 / sqrt(mean(x^2) + eps); x, y [T, H] float32, inverse [T] float64.

    The weight [H] is float32, or float64 where it is not a parameter as it stands.
    Returns False if x holds an infinity or NaN.
    """
    rows, size = x.shape
    finite: list[bool] = []
    flat, out = x.reshape(-1), y.reshape(-1)
    bits = flat.view(np.int32)
    in_parts(
        lambda i, j: finite.append(rms_norm_rows(flat, bits, weight, eps, p, i, j, inverse, out)), rows, 1.5 * size
    )
    return all(finite)


@kernel
def _backward(grad, x, weight, inverse, p, first, last, dx, grid, unit, sums):  # type: ignore[no-untyped-def]
    """Rows first..last; also adds rne(dy normed unit) to sums unless a row exceeds the grid; largest exponent."""
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
        largest = largest64(weighted)
        largest_normed = largest64(normed)  # not finite for a row of zeros where eps is 0
        finite &= max(largest, largest_normed) < INFINITY_BITS_64
        a, b = exponent64(largest), exponent64(largest_normed)
        dot = dot_of(weighted, pow2_64(p - a), normed, pow2_64(p - b)) * (pow2_64(a - p) * pow2_64(b - p)) / size
        for c in range(size):
            out[c] = np.float32((weighted[c] - normed[c] * dot) * scale)
        top = max(top, add_row(contribution, grid, unit, sums))
    return top if finite else NOT_FINITE


def rms_norm_backward(
    grad: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    inverse: np.ndarray,
    p: int,
    dx: np.ndarray,
    grid: int,
    unit: float,
    sums: np.ndarray,
) -> int:
    """dx, and the integer gradient of the weight: sums [H] int64 += rne(dy x inverse unit) over rows.

    A row whose largest contribution is 2^grid or more is left out: the step will be done again. `sums` may
    be empty: no gradient. Returns the largest exponent of any row's contributions, -2^30 if there is none,
    or NOT_FINITE.
    """
    rows, size = x.shape
    found: list[tuple[int, np.ndarray]] = []

    def run(first: int, last: int) -> None:
        part = np.zeros_like(sums)
        top = _backward(
            grad.reshape(-1), x.reshape(-1), weight, inverse, p, first, last, dx.reshape(-1), grid, unit, part
        )
        found.append((int(top), part))

    in_parts(run, rows, 6.0 * size)
    for _, part in found:
        sums += part
    return max((top for top, _ in found), default=NO_GRID)
