"""The steps of which a `row_program` is made, as the numbers that its kernel reads.

Arrays are passed by their addresses: passing arrays of arrays takes as long as a small layer. A place below SCRATCH
instead of an address is memory that only the steps of one program share.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ppo_repro.numerics.arithmetic.contraction import most_outliers

NORM, GRID, PRODUCT, ROTATE, ROTATE_BACK, SILU, SILU_BACK, ADD, NORM_BACK = range(9)
FIELDS = 16
SCRATCH = 3

Place = np.ndarray | int  # an array [T, ..], C-contiguous, or a number of scratch memory


class Step(NamedTuple):
    """One operation over all rows."""

    fields: tuple[int, ...]
    places: tuple[Place, ...]  # whose addresses are among the fields
    real: float = 0.0
    terms: int = 1  # of the operand that it makes
    most: int = 0  # outliers of a row of it
    width: int = 1  # of what it may put into scratch memory


class Matrix(NamedTuple):
    """A matrix of weights as `float64.operands.Weight` with panels, and its outliers."""

    panels: np.ndarray
    squares: np.ndarray
    exponents: np.ndarray
    weights: np.ndarray  # float32, as they came
    transposed: bool
    starts: np.ndarray
    others: np.ndarray


class NormSums(NamedTuple):
    """The integer gradient of a norm's weight: as for `norms.rms_norm_backward`, and where it is in the sums."""

    grid: int
    unit: float
    start: int
    size: int  # 0 where no gradient is wanted


def _address(place: Place) -> int:
    return place if isinstance(place, int) else int(place.__array_interface__["data"][0])


def _fields(op: int, places: tuple[Place, ...], *counts: int) -> tuple[int, ...]:
    return (op, *map(_address, places), *counts)


def norm(x: np.ndarray, y: np.ndarray, inverse: np.ndarray, weight: np.ndarray, eps: float, heads: int) -> Step:
    """`norms.rms_norm` of each row of x, or of each of its heads."""
    places = x, y, inverse, weight
    return Step(_fields(NORM, places, weight.size, heads), places, eps)


def grid(x: np.ndarray, exponents: np.ndarray) -> Step:
    """Put x [T, K] float32 on its grids, for the products that follow; exponents as of `float64.inputs.Inputs`."""
    terms, places = x.shape[1], (x, exponents)
    most = most_outliers(terms)
    return Step(_fields(GRID, places, terms, most), places, terms=terms, most=most)


def product(x: np.ndarray, matrix: Matrix, bias: np.ndarray, y: Place) -> Step:
    """y = `products.PreparedWeight.product` of x, which the last `grid` put on its grids; the bias may be empty."""
    rows, columns = matrix.weights.shape
    terms, size, strides = (rows, columns, (1, columns)) if matrix.transposed else (columns, rows, (columns, 1))
    places = (
        x, matrix.panels, matrix.squares, matrix.weights, matrix.exponents, matrix.starts, matrix.others, y, bias,
    )  # fmt: skip
    fields = _fields(PRODUCT, places, size, *strides, matrix.others.size, terms, bias.size)
    return Step(fields, places, width=size)


def rotate(
    x: np.ndarray, positions: np.ndarray, cosine: np.ndarray, sine: np.ndarray, dim: int, back: bool = False
) -> Step:
    """`layer_parts.rotate`, in place."""
    places, op = (x, positions, cosine, sine), ROTATE_BACK if back else ROTATE
    return Step(_fields(op, places, x.shape[1] // dim, dim, cosine.size), places)


def silu_times(gate: np.ndarray, up: np.ndarray, y: np.ndarray) -> Step:
    """`layer_parts.silu_times`."""
    places = gate, up, y
    return Step(_fields(SILU, places, gate.shape[1]), places)


def silu_times_backward(grad: Place, gate: np.ndarray, up: np.ndarray, d_gate: np.ndarray, d_up: np.ndarray) -> Step:
    """`layer_parts.silu_times_backward`."""
    places = grad, gate, up, d_gate, d_up
    return Step(_fields(SILU_BACK, places, gate.shape[1]), places, width=gate.shape[1])


def add(a: Place, b: Place, y: Place, width: int) -> Step:
    """y = a + b of `width` columns. In place the loop would not be vectorised."""
    places = a, b, y
    return Step(_fields(ADD, places, width), places, width=width)


def norm_backward(
    grad: Place, x: np.ndarray, weight: np.ndarray, inverse: np.ndarray, dx: Place, sums: NormSums, heads: int
) -> Step:
    """`norms.rms_norm_backward` of each row, or of each of its heads."""
    places = grad, x, weight, inverse, dx
    fields = _fields(NORM_BACK, places, weight.size, heads, sums.start, sums.size, sums.grid)
    return Step(fields, places, sums.unit, width=weight.size * heads)
