"""A program over rows that goes back through operations of a decoder layer, and what its steps need of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ppo_repro.numerics.arithmetic.grid import PRODUCT_BITS
from ppo_repro.numerics.gradients import PIECE, GradientAccumulator
from ppo_repro.numerics.kernels import row_program, row_steps
from ppo_repro.numerics.kernels.float64.operands import pack_transposed
from ppo_repro.numerics.kernels.norms import NO_GRID
from ppo_repro.numerics.kernels.row_program import Done
from ppo_repro.numerics.kernels.row_steps import Matrix, NormSums, Place, Step
from ppo_repro.numerics.products import NO_BIAS, array
from ppo_repro.numerics.trunk.layer import LinearInput, NormResult
from ppo_repro.numerics.trunk.weights import LinearWeights, NormWeights

_NANOSECONDS = 0.03  # of a product; only to decide how many threads are worth waking


class _NormGradient(NamedTuple):
    """Where a program puts the gradient of a norm's weight."""

    accumulator: GradientAccumulator
    name: str
    step: int
    sums: NormSums
    heads: int


class Infinite(Exception):
    """A number is not finite. Kernel by kernel, what it is will be named."""


def cost_of(linears: Sequence[LinearWeights]) -> float:
    """Nanoseconds of a row."""
    return _NANOSECONDS * sum(linear.weight.numel() for linear in linears)


def matrix_of(linear: LinearWeights, transposed: bool) -> Matrix:
    """The weights of a linear layer for products with its inputs, or with the gradients of its results."""
    packed, outliers = linear.prepared.float64_operand(linear.weight, 0 if transposed else 1)
    if not packed.finite:
        raise Infinite
    weights = array(linear.weight)
    packed = pack_transposed(weights, packed) if transposed else packed
    starts, others = outliers.starts, outliers.columns
    return Matrix(packed.panels, packed.squares, packed.exponents, weights, transposed, starts, others)


class BackwardProgram:
    """A program that goes back through some operations of a layer."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._norms: list[_NormGradient] = []
        self._sums = 0
        self.of_results: list[tuple[LinearWeights, LinearInput, LinearInput]] = []

    def add(self, step: Step) -> None:
        """Go through an operation that has no weights."""
        self._steps.append(step)

    def through_linear(self, linear: LinearWeights, x: LinearInput, grad: np.ndarray, dx: Place) -> None:
        """dx = grad W."""
        given = LinearInput(grad, np.empty(len(grad), np.int64))
        self._steps.append(row_steps.grid(grad, given.exponents))
        self._steps.append(row_steps.product(grad, matrix_of(linear, True), NO_BIAS, dx))
        self.of_results.append((linear, x, given))

    def through_norm(self, norm: NormWeights, result: NormResult, grad: Place, dx: Place, heads: int = 1) -> None:
        """dx of a norm of each row, or of each head, and the gradient of its weight."""
        sums = NormSums(NO_GRID, 0.0, self._sums, 0)
        if isinstance(norm.accumulator, GradientAccumulator):
            name = norm.accumulator.names[id(norm.weight)]
            limit, size = norm.accumulator.grid(name), len(norm.values)
            # without a grid only the exponents are wanted
            law = (NO_GRID, 0.0) if limit is None else (limit, 2.0 ** (PRODUCT_BITS - limit))
            sums = NormSums(*law, self._sums, size)
            self._norms.append(_NormGradient(norm.accumulator, name, len(self._steps), sums, heads))
            self._sums += size
        self._steps.append(row_steps.norm_backward(grad, result.x, norm.values, result.inverse, dx, sums, heads))

    def run(self, rows: int) -> list[tuple[int, Done]]:
        """Run it; the sums of the norms' gradients, of so many rows each that an int64 holds them."""
        nanoseconds = cost_of([linear for linear, _, _ in self.of_results])
        piece = PIECE // max((norm.heads for norm in self._norms), default=1)
        found = []
        for first in range(0, rows, piece):
            last = min(first + piece, rows)
            done = row_program.run(self._steps, first, last, nanoseconds, self._sums)
            if done is None:
                raise Infinite
            found.append((last - first, done))
        return found

    def keep_norms(self, found: Sequence[tuple[int, Done]]) -> None:
        """Add the gradients of the norms' weights to their accumulators."""
        for rows, done in found:
            for norm in self._norms:
                if done.tops[norm.step] == NO_GRID:
                    continue
                norm.accumulator.observe(norm.name, int(done.tops[norm.step]))
                if norm.sums.grid != NO_GRID:
                    total = norm.accumulator.sum_of(norm.name, rows * norm.heads).numpy()
                    total += done.sums[norm.sums.start : norm.sums.start + norm.sums.size]
