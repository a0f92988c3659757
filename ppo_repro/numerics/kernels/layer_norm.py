"""Layer norm, forward and backward, one pass over each row while it is in the cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ppo_repro.numerics.kernels.core.compile import exact_sum, kernel
from ppo_repro.numerics.kernels.core.pool import in_parts
from ppo_repro.numerics.kernels.core.rows import INFINITY_BITS, largest_bits
from ppo_repro.numerics.kernels.core.scalar import exponent32, exponent64, pow2_64
from ppo_repro.numerics.kernels.norms import (
    INFINITY_BITS_64,
    NO_GRID,
    NOT_FINITE,
    add_row,
    dot_of,
    largest64,
    sum_of_squares,
)


class IntegerSums(NamedTuple):
    """Where rows of contributions are added: sums [H] int64 += rne(row unit) of rows below 2^grid.

    Rows that reach 2^grid are left out: the step will be done again. Empty sums: no gradient is wanted.
    """

    grid: int
    unit: float
    sums: np.ndarray


@exact_sum
def _sum_on_grid(row, up):  # type: ignore[no-untyped-def]
    """sum rne(row up): integers below 2^53 in every order."""
    total = 0.0
    for c in range(row.size):
        total += np.rint(np.float64(row[c]) * up)
    return total


@kernel
def _forward(x, bits, weight, bias, eps, mean_bits, p, first, last, mean, inverse, y):  # type: ignore[no-untyped-def]
    size = weight.size
    centred = np.empty(size)
    finite = True
    for r in range(first, last):
        row, out = x[r * size : r * size + size], y[r * size : r * size + size]
        largest = largest_bits(bits[r * size : r * size + size])
        finite &= largest < INFINITY_BITS
        e = exponent32(largest)
        middle = _sum_on_grid(row, pow2_64(mean_bits - e)) * pow2_64(e - mean_bits) / size
        for c in range(size):
            centred[c] = np.float64(row[c]) - middle
        e = exponent64(largest64(centred))
        down = pow2_64(e - p)
        mean_square = sum_of_squares(centred, pow2_64(p - e)) * (down * down) / size
        scale = 1.0 / np.sqrt(mean_square + eps)
        mean[r], inverse[r] = middle, scale
        for c in range(size):
            out[c] = np.float32((centred[c] * scale) * np.float64(weight[c]) + np.float64(bias[c]))
    return finite


def layer_norm(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    eps: float,
    bits: tuple[int, int],
    mean: np.ndarray,
    inverse: np.ndarray,
    y: np.ndarray,
) -> bool:
    """y = w (x - mean) inverse + b, inverse = 1 / sqrt(var + eps); x, y [T, H] float32, mean, inverse [T] float64.

    `bits` are those of the grids of the mean and of the mean square. Returns False if x holds an infinity or NaN.
    """
    rows, size = x.shape
    finite: list[bool] = []
    flat, out = x.reshape(-1), y.reshape(-1)
    patterns = flat.view(np.int32)

    def run(first: int, last: int) -> None:
        finite.append(_forward(flat, patterns, weight, bias, eps, *bits, first, last, mean, inverse, out))

    in_parts(run, rows, 1.5 * size)
    return all(finite)


@kernel
def _backward(  # type: ignore[no-untyped-def]
    grad, x, weight, mean, inverse, mean_bits, p, first, last, dx, weight_grid, weight_unit, weight_sums,
    bias_grid, bias_unit, bias_sums,
):  # fmt: skip
    """Rows first..last; the largest exponents of the contributions to weight and bias, NOT_FINITE twice if so."""
    size = weight.size
    finite = True
    upstream, normed, weighted, contribution = np.empty(size), np.empty(size), np.empty(size), np.empty(size)
    weight_top = bias_top = np.int64(NO_GRID)
    for r in range(first, last):
        dy, row = grad[r * size : r * size + size], x[r * size : r * size + size]
        out = dx[r * size : r * size + size]
        middle, scale = mean[r], inverse[r]
        for c in range(size):
            d = np.float64(dy[c])
            n = (np.float64(row[c]) - middle) * scale
            upstream[c], normed[c] = d, n
            weighted[c] = d * np.float64(weight[c])
            contribution[c] = d * n
        largest = largest64(weighted)
        largest_normed = largest64(normed)  # not finite for a row of equal numbers where eps is 0
        finite &= max(largest, largest_normed) < INFINITY_BITS_64
        a, b = exponent64(largest), exponent64(largest_normed)
        mean_weighted = _sum_on_grid(weighted, pow2_64(mean_bits - a)) * pow2_64(a - mean_bits) / size
        dot = dot_of(weighted, pow2_64(p - a), normed, pow2_64(p - b)) * (pow2_64(a - p) * pow2_64(b - p)) / size
        for c in range(size):
            out[c] = np.float32(((weighted[c] - mean_weighted) - normed[c] * dot) * scale)
        weight_top = max(weight_top, add_row(contribution, weight_grid, weight_unit, weight_sums))
        bias_top = max(bias_top, add_row(upstream, bias_grid, bias_unit, bias_sums))
    return (weight_top, bias_top) if finite else (np.int64(NOT_FINITE), np.int64(NOT_FINITE))


def layer_norm_backward(
    grad: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    mean: np.ndarray,
    inverse: np.ndarray,
    bits: tuple[int, int],
    dx: np.ndarray,
    of_weight: IntegerSums,
    of_bias: IntegerSums,
) -> tuple[int, int]:
    """dx = inverse (w dy - mean(w dy) - n mean(w dy n)), n = (x - mean) inverse, and the integer gradients.

    The weight's contributions are dy n, the bias's dy. Returns the largest exponents of any row's, NO_GRID where
    there is none, or NOT_FINITE for both.
    """
    rows, size = x.shape
    arrays = grad.reshape(-1), x.reshape(-1), weight, mean, inverse
    found: list[tuple[int, int, np.ndarray, np.ndarray]] = []

    def run(first: int, last: int) -> None:
        parts = np.zeros_like(of_weight.sums), np.zeros_like(of_bias.sums)
        tops = _backward(
            *arrays, *bits, first, last, dx.reshape(-1), of_weight.grid, of_weight.unit, parts[0],
            of_bias.grid, of_bias.unit, parts[1],
        )  # fmt: skip
        found.append((int(tops[0]), int(tops[1]), *parts))

    in_parts(run, rows, 2.2 * size)
    weight_sums, bias_sums = of_weight.sums, of_bias.sums
    for _, _, weight_part, bias_part in found:
        weight_sums += weight_part
        bias_sums += bias_part
    return max((f[0] for f in found), default=NO_GRID), max((f[1] for f in found), default=NO_GRID)
