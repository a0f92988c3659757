"""Layer norm, forward and backward, row by row while a row is in the cache.

Sums over a row are sums of integers, exact in every order; all else is rounded as in the eager code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ppo_repro.numerics.arithmetic.grid import DOT_BITS
from ppo_repro.numerics.kernels.core.compile import exact_sum, kernel
from ppo_repro.numerics.kernels.core.pool import results_of_parts
from ppo_repro.numerics.kernels.core.rows import largest_bits, largest_bits_64, scaled_dot, sum_of_squares
from ppo_repro.numerics.kernels.core.scalar import INFINITY_BITS, INFINITY_BITS_64, exponent32, exponent64, pow2_64
from ppo_repro.numerics.kernels.norms import NO_GRID, NOT_FINITE, add_row


class IntegerSums(NamedTuple):
    """The integer gradient of a parameter: sums [H] int64 += rne(row unit) for each row of contributions below 2^grid.

    Rows that reach 2^grid are left out: the step will be redone. Empty sums: no gradient is wanted.
    """

    grid: int
    unit: float
    sums: np.ndarray


@exact_sum
def _sum_on_grid(row, up):  # type: ignore[no-untyped-def]
    """sum rne(row up), a sum of integers below 2^53: exact in every order."""
    total = 0.0
    for c in range(row.size):
        total += np.rint(np.float64(row[c]) * up)
    return total


@kernel
def _forward(x, bits, weight, bias, eps, mean_bits, first, last, mean, inverse, y):  # type: ignore[no-untyped-def]
    """Rows first..last-1 of `layer_norm`, flat; `bits` are those of x. Returns whether they are finite."""
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
        e = exponent64(largest_bits_64(centred))
        down = pow2_64(e - DOT_BITS)
        mean_square = sum_of_squares(centred, pow2_64(DOT_BITS - e)) * (down * down) / size
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
    mean_bits: int,
    mean: np.ndarray,
    inverse: np.ndarray,
    y: np.ndarray,
) -> bool:
    """y = w (x - mean) inverse + b, inverse = 1 / sqrt(var + eps); x, y [T, H] float32, mean, inverse [T] float64.

    `mean_bits` are the grid bits of the mean. Returns False if x holds an infinity or NaN.
    """
    rows, size = x.shape
    flat, out = x.reshape(-1), y.reshape(-1)
    x_bits = flat.view(np.int32)

    def run(first: int, last: int) -> bool:
        return bool(_forward(flat, x_bits, weight, bias, eps, mean_bits, first, last, mean, inverse, out))

    return all(results_of_parts(run, rows, 1.5 * size))


@kernel
def _backward(  # type: ignore[no-untyped-def]
    grad, x, weight, mean, inverse, mean_bits, first, last, dx, weight_grid, weight_unit, weight_sums,
    bias_grid, bias_unit, bias_sums,
):  # fmt: skip
    """Rows first..last-1 of `layer_norm_backward`, flat. Returns what it does, for these rows."""
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
        largest = largest_bits_64(weighted)
        largest_normed = largest_bits_64(normed)  # not finite for a row of equal numbers where eps is 0
        finite &= max(largest, largest_normed) < INFINITY_BITS_64
        a, b = exponent64(largest), exponent64(largest_normed)
        mean_weighted = _sum_on_grid(weighted, pow2_64(mean_bits - a)) * pow2_64(a - mean_bits) / size
        dot = scaled_dot(weighted, pow2_64(DOT_BITS - a), normed, pow2_64(DOT_BITS - b))
        dot = dot * (pow2_64(a - DOT_BITS) * pow2_64(b - DOT_BITS)) / size
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
    mean_bits: int,
    dx: np.ndarray,
    weight_gradient: IntegerSums,
    bias_gradient: IntegerSums,
) -> tuple[int, int]:
    """dx = inverse (w dy - mean(w dy) - n mean(w dy n)), n = (x - mean) inverse, and the integer gradients.

    A row contributes dy n to the weight and dy to the bias. Returns the largest exponents of any row's contributions
    to each, NO_GRID where there is none, or NOT_FINITE for both.
    """
    rows, size = x.shape
    arrays = grad.reshape(-1), x.reshape(-1), weight, mean, inverse

    def run(first: int, last: int) -> tuple[int, int, np.ndarray, np.ndarray]:
        own_weight, own_bias = (g._replace(sums=np.zeros_like(g.sums)) for g in (weight_gradient, bias_gradient))
        tops = _backward(*arrays, mean_bits, first, last, dx.reshape(-1), *own_weight, *own_bias)
        return int(tops[0]), int(tops[1]), own_weight.sums, own_bias.sums

    results = results_of_parts(run, rows, 2.2 * size)
    weight_sums, bias_sums = weight_gradient.sums, bias_gradient.sums
    for _, _, own_weight_sums, own_bias_sums in results:
        weight_sums += own_weight_sums
        bias_sums += own_bias_sums
    return max((r[0] for r in results), default=NO_GRID), max((r[1] for r in results), default=NO_GRID)
