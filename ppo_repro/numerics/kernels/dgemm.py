"""Contractions by the float64 matrix product of the BLAS, for any CPU: grid values in, one rounding after.

A grid value is A 2^(e - p). Products of grid values and their sums are exact in float64 just as those of the integers
A, so no scales are needed. torch multiplies, one thread for each part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ppo_repro.numerics.kernels.core.pool import in_parts, results_of_parts
from ppo_repro.numerics.kernels.core.rows import add_integers, grid_values, round_rows, scaled


@dataclass(frozen=True)
class GridMatrix:
    """A matrix whose rows are on grids: the inputs, or the weights with one row for each output."""

    values: torch.Tensor  # [rows, terms] float64 grid values
    exponents: np.ndarray  # int64 [rows], see `rows.row_exponents`
    p: int  # bits of the grids
    finite: bool


@dataclass(frozen=True)
class IntegerInputs:
    """The inputs of a layer as integers, for integer gradients."""

    integers: torch.Tensor  # [T, K] float64, at most 2^bits
    bits: int


def prepare(x: np.ndarray, p: int) -> GridMatrix:
    """Grid values of inputs or weights x [rows, terms] float32, C-contiguous, along their rows."""
    values, exponents = np.empty(x.shape), np.empty(len(x), np.int64)

    def run(first: int, last: int) -> bool:
        return grid_values(x[first:last], p, exponents[first:last], values[first:last])

    finite = results_of_parts(run, len(x), 1.0 * x.shape[1])
    return GridMatrix(torch.from_numpy(values), exponents, p, all(finite))


def contract(x: GridMatrix, weight: GridMatrix, bias: np.ndarray, y: np.ndarray) -> bool:
    """y = fl32(sum of x w on their grids) + 0 [+ bias]; x [M, terms], y [M, columns] float32, C-contiguous.

    Returns False, with y undefined, if x or w holds an infinity or NaN. ValueError if their grid bits differ.
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


def pack_inputs(x: np.ndarray, x_up: np.ndarray, x_bits: int) -> IntegerInputs:
    """rne(x[t, k] x_up[t]), at most 2^x_bits; x [T, K] float32, x_up [T] float64, C-contiguous."""
    return IntegerInputs(torch.from_numpy(scaled(x, x_up)), x_bits)


def accumulate(grad: np.ndarray, up: np.ndarray, bits: int, x: IntegerInputs, sums: np.ndarray, fresh: bool) -> None:
    """sums[n, k] += sum_t rne(grad[t, n] up[t]) x[t, k], exactly; see `amx.gradient.accumulate`.

    Tokens are taken in chunks whose sums stay below 2^53.
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
