"""The contraction by the float64 matrix product of the BLAS, for any CPU: grid values in, one rounding after.

A grid value is A 2^(e - p); products and their sums are exact in float64 as those of the integers are, so
no scale has to be carried along. torch multiplies, one thread for each part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ppo_repro.numerics.kernels.core.pool import in_parts
from ppo_repro.numerics.kernels.core.rows import add_integers, grid_values, round_rows, scaled


@dataclass(frozen=True)
class Dense:
    """Grid values [rows, terms] float64, each row on its grid: of inputs, or of a weight matrix's output columns."""

    values: torch.Tensor
    exponents: np.ndarray  # int64 [rows] as of `rows.row_exponents`
    p: int
    finite: bool


@dataclass(frozen=True)
class Inputs:
    """The inputs of a layer, [T, K] float64 integers of at most 2^bits."""

    integers: torch.Tensor
    bits: int


def prepare(w: np.ndarray, p: int) -> Dense:
    """Grid values of w [columns, terms] float32, C-contiguous, along its rows."""
    values, exponents = np.empty(w.shape), np.empty(len(w), np.int64)
    finite = grid_values(w, p, exponents, values)
    return Dense(torch.from_numpy(values), exponents, p, finite)


def prepare_rows(x: np.ndarray, p: int) -> Dense:
    """Grid values of the inputs x [M, terms] float32, C-contiguous, along their rows."""
    values, exponents = np.empty(x.shape), np.empty(len(x), np.int64)
    finite: list[bool] = []

    def part(first: int, last: int) -> None:
        finite.append(grid_values(x[first:last], p, exponents[first:last], values[first:last]))

    in_parts(part, len(x), 1.0 * x.shape[1])
    return Dense(torch.from_numpy(values), exponents, p, all(finite))


def contract(x: Dense, weight: Dense, bias: np.ndarray, y: np.ndarray) -> bool:
    """y = fl32(sum of x w on their grids) + 0 [+ bias]; x [M, terms], y [M, columns] float32, C-contiguous.

    Returns False, with y undefined, if x or w holds an infinity or NaN. ValueError unless their grids are the same.
    """
    if x.p != weight.p:
        raise ValueError(f"grids of {x.p} bits times grids of {weight.p}")
    if not (x.finite and weight.finite):
        return False
    columns, terms = weight.values.shape

    def run(first: int, last: int) -> None:
        total = torch.mm(x.values[first:last], weight.values.t())
        round_rows(total.numpy(), bias, y[first:last])

    in_parts(run, len(x.values), 0.02 * terms * columns)
    return True


def pack_inputs(x: np.ndarray, x_up: np.ndarray, x_bits: int) -> Inputs:
    """rne(x[t, k] x_up[t]), at most 2^x_bits; x [T, K] float32, x_up [T] float64, C-contiguous."""
    return Inputs(torch.from_numpy(scaled(x, x_up)), x_bits)


def accumulate(grad: np.ndarray, up: np.ndarray, bits: int, x: Inputs, sums: np.ndarray, fresh: bool) -> None:
    """sums[n, k] += sum_t rne(grad[t, n] up[t]) x[t, k], exactly; see gradient.accumulate.

    So many tokens at a time that their sum stays below 2^53.
    """
    if fresh:
        sums[:] = 0
    chunk = 1 << (53 - bits - x.bits)
    for start in range(0, len(grad), chunk):
        rows = slice(start, start + chunk)
        z = torch.from_numpy(scaled(grad[rows], up[rows]))
        operand = x.integers[rows]

        def run(first: int, last: int) -> None:
            total = torch.mm(z[:, first:last].t(), operand)  # noqa: B023
            add_integers(total.numpy(), sums[first:last])

        in_parts(run, len(sums), 0.02 * operand.numel())
