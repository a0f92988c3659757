"""The contraction by the float64 matrix product of the BLAS, for any CPU: grid values in, one rounding after.

A grid value is A 2^(e - p); products and their sums are exact in float64 as those of the integers are, so
no scale has to be carried along. torch multiplies, one thread for each part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ppo_repro.kernels.pool import in_parts
from ppo_repro.kernels.rows import add_integers, grid_values, round_rows, scaled


@dataclass(frozen=True)
class Dense:
    """Grid values of a weight matrix: `values` [columns, terms] float64, each output column on its grid."""

    values: torch.Tensor
    p: int
    finite: bool


def prepare(w: np.ndarray, p: int) -> Dense:
    """Grid values of w [columns, terms] float32, C-contiguous, along its rows."""
    values = np.empty(w.shape)
    finite = grid_values(w, p, values)
    return Dense(torch.from_numpy(values), p, finite)


def contract(x: np.ndarray, weight: Dense, bias: np.ndarray, y: np.ndarray) -> bool:
    """y = fl32(sum of x w on their grids) + 0 [+ bias]; x [M, terms], y [M, columns] float32, C-contiguous.

    Returns False, with y undefined, if x or w holds an infinity or NaN.
    """
    columns, terms = weight.values.shape
    finite: list[bool] = [weight.finite]

    def run(first: int, last: int) -> None:
        rows = np.empty((last - first, terms))
        finite.append(grid_values(x[first:last], weight.p, rows))
        total = torch.mm(torch.from_numpy(rows), weight.values.t())
        round_rows(total.numpy(), bias, y[first:last])

    in_parts(run, len(x), 0.02 * terms * columns)
    return all(finite)


def accumulate(
    grad: np.ndarray, up: np.ndarray, bits: int, x: np.ndarray, x_up: np.ndarray, x_bits: int, sums: np.ndarray
) -> None:
    """sums[n, k] += sum_t rne(grad[t, n] up[t]) rne(x[t, k] x_up[t]), exactly; see gradient.accumulate.

    So many tokens at a time that their sum stays below 2^53.
    """
    chunk = 1 << (53 - bits - x_bits)
    for start in range(0, len(x), chunk):
        rows = slice(start, start + chunk)
        z = torch.from_numpy(scaled(grad[rows], up[rows]))
        operand = torch.from_numpy(scaled(x[rows], x_up[rows]))

        def run(first: int, last: int) -> None:
            total = torch.mm(z[:, first:last].t(), operand)  # noqa: B023
            add_integers(total.numpy(), sums[first:last])

        in_parts(run, len(sums), 0.02 * operand.numel())
