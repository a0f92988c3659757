"""Rows on grids: their exponents, and their values in float64 for products by the BLAS."""

from __future__ import annotations

import numpy as np

from ppo_repro.numerics.kernels.core.compile import kernel
from ppo_repro.numerics.kernels.core.pool import in_parts
from ppo_repro.numerics.kernels.core.scalar import exponent32, pow2_64, round_to_f32_plus_zero

INFINITY_BITS = np.int32(0x7F800000)
NOTHING = np.int32(-(1 << 30))  # the exponent of a row of zeros


@kernel
def largest_bits(bits):  # type: ignore[no-untyped-def]
    """Bits of the largest magnitude; they order like the magnitudes, and NaN above infinity."""
    largest = np.int32(0)
    for c in range(bits.size):
        largest = max(largest, bits[c] & np.int32(0x7FFFFFFF))
    return largest


@kernel
def _row_exponents(bits, columns, first, last, exponents):  # type: ignore[no-untyped-def]
    """Grid exponent of rows first..last of a flat matrix, NOTHING for zeros. False if one is not finite."""
    finite = True
    for r in range(first, last):
        largest = largest_bits(bits[r * columns : r * columns + columns])
        finite &= largest < INFINITY_BITS
        exponents[r] = NOTHING if largest == 0 else np.int32(exponent32(largest))
    return finite


def row_exponents(x: np.ndarray) -> np.ndarray | None:
    """int32 [M]: smallest e >= -100 with max |row| < 2^e, NOTHING for rows of zeros; None if not finite."""
    rows, columns = x.shape
    exponents = np.empty(rows, np.int32)
    finite: list[bool] = []
    bits = x.reshape(-1).view(np.int32)
    in_parts(lambda i, j: finite.append(_row_exponents(bits, columns, i, j, exponents)), rows, 0.15 * columns)
    return exponents if all(finite) else None


@kernel
def largest_sum(a, b):  # type: ignore[no-untyped-def]
    """Largest a[t] + b[t] of int64 exponents, neither of them NOTHING; NOTHING where there is none."""
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
def _grid_values(x, bits, columns, p, exponents, out):  # type: ignore[no-untyped-def]
    finite = True
    for r in range(exponents.size):
        start = r * columns
        largest = largest_bits(bits[start : start + columns])
        finite &= largest < INFINITY_BITS
        e = exponent32(largest)
        exponents[r] = NOTHING if largest == 0 else e
        up, down = pow2_64(p - e), pow2_64(e - p)
        row, target = x[start : start + columns], out[start : start + columns]
        for c in range(columns):
            target[c] = np.rint(np.float64(row[c]) * up) * down
    return finite


def grid_values(x: np.ndarray, p: int, exponents: np.ndarray, out: np.ndarray) -> bool:
    """out = rne(x 2^(p - e)) 2^(e - p) of every row; x [M, K] float32, out float64. False if not finite.

    `exponents` int64 [M] as of `row_exponents`.
    """
    flat = x.reshape(-1)
    return bool(_grid_values(flat, flat.view(np.int32), x.shape[1], p, exponents, out.reshape(-1)))


@kernel
def _scaled(x, columns, up, first, last, out):  # type: ignore[no-untyped-def]
    for r in range(first, last):
        row, target = x[r * columns : r * columns + columns], out[r * columns : r * columns + columns]
        scale = up[r]
        for c in range(columns):
            target[c] = np.rint(np.float64(row[c]) * scale)


def scaled(x: np.ndarray, up: np.ndarray) -> np.ndarray:
    """rne(x[t, :] up[t]) as float64 [T, K]; x float32, up float64."""
    rows, columns = x.shape
    out = np.empty((rows, columns))
    flat, target = x.reshape(-1), out.reshape(-1)
    in_parts(lambda i, j: _scaled(flat, columns, up, i, j, target), rows, 0.5 * columns)
    return out


@kernel
def _round(total, bias, columns, first, last, out):  # type: ignore[no-untyped-def]
    for r in range(first, last):
        row, target = total[r * columns : r * columns + columns], out[r * columns : r * columns + columns]
        if bias.size:
            for c in range(columns):
                target[c] = round_to_f32_plus_zero(row[c]) + bias[c]
        else:
            for c in range(columns):
                target[c] = round_to_f32_plus_zero(row[c])


def round_rows(total: np.ndarray, bias: np.ndarray, out: np.ndarray) -> None:
    """out = fl32(total) + 0 [+ bias]; total [M, N] float64, out float32, bias [N] float32 or empty."""
    rows, columns = total.shape
    _round(total.reshape(-1), bias, columns, 0, rows, out.reshape(-1))


@kernel
def _add_integers(total, sums):  # type: ignore[no-untyped-def]
    for i in range(total.size):
        sums[i] += np.int64(total[i])


def add_integers(total: np.ndarray, sums: np.ndarray) -> None:
    """sums += total: float64 integers below 2^53 onto int64, any equal shapes."""
    _add_integers(total.reshape(-1), sums.reshape(-1))
