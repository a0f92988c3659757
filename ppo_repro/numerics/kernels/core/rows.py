"""Rows on grids: exponents, outliers, units of integer gradients, and exact sums of integers.

Maxima are taken over the bits of magnitudes: this vectorises, and also detects NaN and infinity.
"""

from __future__ import annotations

import numpy as np

from ppo_repro.numerics.arithmetic.grid import DOT_BITS, MIN_EXPONENT
from ppo_repro.numerics.kernels.core.compile import inline, kernel, kernel_part
from ppo_repro.numerics.kernels.core.pool import results_of_parts
from ppo_repro.numerics.kernels.core.scalar import (
    INFINITY_BITS,
    MAGNITUDE32,
    MAGNITUDE64,
    exponent32,
    magnitude_bits,
    pow2_32,
    pow2_64,
)

NOTHING = np.int32(-(1 << 30))  # the exponent of a row of zeros
_CHUNK = 1 << 10  # products of at most 2^52, whose sum fits into int64
_BELOW = (1 << DOT_BITS) - 1


@kernel_part
def largest_bits(bits):  # type: ignore[no-untyped-def]
    """Bits of the largest magnitude of a float32 row, given as its bits."""
    largest = np.int32(0)
    for c in range(bits.size):
        largest = max(largest, bits[c] & MAGNITUDE32)
    return largest


@kernel_part
def largest_bits_64(row):  # type: ignore[no-untyped-def]
    """Bits of the largest magnitude of a float64 row."""
    bits = row.view(np.int64)
    largest = np.int64(0)
    for c in range(bits.size):
        largest = max(largest, bits[c] & MAGNITUDE64)
    return largest


@kernel_part
def fits(largest, room):  # type: ignore[no-untyped-def]
    """Whether room times the number with these bits is finite; otherwise no grid of a weight holds it."""
    return magnitude_bits(np.int32(largest).view(np.float32) * room) < INFINITY_BITS


@kernel_part
def grid_exponent(row, room, gap, most):  # type: ignore[no-untyped-def]
    """The exponent of a float32 row's grid as `arithmetic.contraction` defines it, and whether the row has outliers.

    Outliers are the numbers with |x room| >= 2^exponent, at most `most`, fewer than there are. The row is finite.
    """
    bits = row.view(np.int32)
    e = exponent32(magnitude_bits(np.int32(largest_bits(bits)).view(np.float32) * room))
    if e - gap < MIN_EXPONENT:
        return e, False
    least, count = pow2_32(e - gap), 0
    for c in range(row.size):
        count += 1 if np.abs(row[c] * room) >= least else 0
    if count > most:
        return e, False
    counts = np.zeros(256, np.int64)
    for c in range(row.size):
        counts[magnitude_bits(row[c] * room) >> 23] += 1
    seen, field = np.int64(0), 255
    while seen + counts[field] <= most:
        seen += counts[field]
        field -= 1
    others = max(np.int64(field) - 126, MIN_EXPONENT)
    return (others, True) if e - others >= gap else (e, False)


@inline
def round_limbs(above, below, bits):  # type: ignore[no-untyped-def]
    """`grid.round_limbs`: fl64(above 2^bits + below) of int64 numbers, |above| < 2^60, rounded once."""
    above = above + (below >> bits)
    fine = ((above & 0xFF) << bits) + (below & ((1 << bits) - 1))
    return np.float64(above >> 8) * pow2_64(8 + bits) + np.float64(fine)


@kernel_part
def _squares(row, up):  # type: ignore[no-untyped-def]
    """sum rne(row up)^2 of up to _CHUNK numbers, int64."""
    total = np.int64(0)
    for c in range(row.size):
        a = np.int64(np.int32(np.rint(row[c] * up)))
        total += a * a
    return total


@kernel_part
def sum_of_squares(row, up):  # type: ignore[no-untyped-def]
    """fl64(sum rne(row up)^2) of integers up to 2^DOT_BITS, the sum exact; `up` has the type of the row."""
    if row.size <= _CHUNK:
        return np.float64(_squares(row, up))
    high, low = np.int64(0), np.int64(0)
    for start in range(0, row.size, _CHUNK):
        total = _squares(row[start : start + _CHUNK], up)
        high, low = high + (total >> DOT_BITS), low + (total & _BELOW)
    return round_limbs(high, low, DOT_BITS)


@kernel_part
def scaled_dot(a, a_up, b, b_up):  # type: ignore[no-untyped-def]
    """fl64(sum rne(a a_up) rne(b b_up)) of float64 rows and integers up to 2^DOT_BITS, the sum exact."""
    if a.size <= _CHUNK:
        return np.float64(_products(a, a_up, b, b_up))
    high, low = np.int64(0), np.int64(0)
    for start in range(0, a.size, _CHUNK):
        total = _products(a[start : start + _CHUNK], a_up, b[start : start + _CHUNK], b_up)
        high, low = high + (total >> DOT_BITS), low + (total & _BELOW)
    return round_limbs(high, low, DOT_BITS)


@kernel_part
def _products(a, a_up, b, b_up):  # type: ignore[no-untyped-def]
    """sum rne(a a_up) rne(b b_up) of up to _CHUNK numbers, int64."""
    total = np.int64(0)
    for c in range(a.size):
        x, y = np.int32(np.rint(a[c] * a_up)), np.int32(np.rint(b[c] * b_up))
        total += np.int64(x) * np.int64(y)
    return total


@kernel
def _row_exponents(bits, columns, first, last, exponents):  # type: ignore[no-untyped-def]
    """Grid exponents of rows first..last-1 of a flat matrix, NOTHING for zeros; returns whether all are finite."""
    finite = True
    for r in range(first, last):
        largest = largest_bits(bits[r * columns : r * columns + columns])
        finite &= largest < INFINITY_BITS
        exponents[r] = NOTHING if largest == 0 else np.int32(exponent32(largest))
    return finite


def row_exponents(x: np.ndarray) -> np.ndarray | None:
    """int32 [M]: smallest e >= -100 with max |row| < 2^e, NOTHING for a row of zeros; None if a row is not finite."""
    rows, columns = x.shape
    exponents = np.empty(rows, np.int32)
    bits = x.reshape(-1).view(np.int32)
    finite = results_of_parts(lambda i, j: _row_exponents(bits, columns, i, j, exponents), rows, 0.15 * columns)
    return exponents if all(finite) else None


@kernel
def largest_sum(a, b):  # type: ignore[no-untyped-def]
    """Largest a[t] + b[t] of int64 exponents where neither is NOTHING; NOTHING where there is no such t."""
    largest = np.int64(NOTHING)
    for t in range(a.size):
        if a[t] != NOTHING and b[t] != NOTHING:
            largest = max(largest, a[t] + b[t])
    return largest


@kernel
def product_units(a, b, shift, bits, least, up, a_up):  # type: ignore[no-untyped-def]
    """up = 2^(a + shift), 2^-1022 where a or b is NOTHING; a_up = 2^(bits - max(a, least)). int64 to float64 [T]."""
    for t in range(a.size):
        live = a[t] != NOTHING and b[t] != NOTHING
        up[t] = pow2_64(a[t] + shift if live else -1022)
        a_up[t] = pow2_64(bits - max(a[t], least))


@kernel
def _add_rows_on_grid(x, columns, exponents, limit, unit, ids, sums):  # type: ignore[no-untyped-def]
    for t in range(exponents.size):
        if exponents[t] == NOTHING or exponents[t] > limit:
            continue
        row = x[t * columns : t * columns + columns]
        start = ids[t] * columns if ids.size else 0
        target = sums[start : start + columns]
        for c in range(columns):
            target[c] += np.int64(np.rint(np.float64(row[c]) * unit))


def add_rows_on_grid(
    x: np.ndarray, exponents: np.ndarray, limit: int, unit: float, ids: np.ndarray, sums: np.ndarray
) -> None:
    """sums[ids[t]] += rne(x[t, :] unit), or sums += ... where `ids` is empty; x [T, N] float32, sums int64.

    Rows with an exponent above `limit` are left out: the step will be redone.
    """
    _add_rows_on_grid(x.reshape(-1), x.shape[1], exponents, limit, unit, ids, sums.reshape(-1))
