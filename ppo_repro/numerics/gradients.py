"""Parameter gradients as integers: one int64 per parameter, on one power-of-two grid per tensor.

Integer addition is associative, so a gradient does not depend on micro-batches, padding, packing, threads or ranks. The
grid exponent E of a tensor is that of the largest contribution in the previous step; it is optimizer state. If the
largest contribution of this step lies outside the window around E, the step is redone on the right grid; nothing
saturates.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ppo_repro.errors import NumericsError, UserError
from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic.grid import OPERAND_BITS, ceil_log2
from ppo_repro.numerics.kernels.optimizer import to_float32
from ppo_repro.numerics.products import (
    NOTHING,
    add_integer_rows,
    add_products,
    input_exponents,
    largest_product,
    product_units,
    row_exponents,
)
from ppo_repro.ranks import ALONE, Ranks

GRADIENT_BITS = 26  # of an output gradient on its grid
TOTAL_BITS = GRADIENT_BITS + OPERAND_BITS  # of the largest contribution to a sum
HEADROOM = 4  # how many powers of two a contribution may grow before the step is redone
WINDOW_BELOW = 4  # how many it may shrink


def assert_no_wrap(tokens: int) -> None:
    """Raise UserError if a sum over `tokens` tokens could overflow int64; a tied weight counts each token twice."""
    if TOTAL_BITS + ceil_log2(2 * tokens) > 62:
        raise UserError(
            f"ppo.minibatch_size: {tokens} tokens (prompts included) in one optimizer step; "
            f"exact gradients hold up to {1 << (61 - TOTAL_BITS)}; make it smaller"
        )


def _to_float32(integers: Tensor, unit: float, out: Tensor) -> Tensor:
    if backend.has_kernels(integers):
        to_float32(integers.view(-1).numpy(), unit, out.view(-1).numpy())
        return out
    return out.copy_(integers.to(torch.float64) * unit)


class GradientAccumulator:
    """Collects the integer gradients of one module's parameters over any number of backward passes."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self.parameters = dict(parameters)
        self.names = {id(p): name for name, p in self.parameters.items()}
        self.grids: dict[str, int] = {}  # E of each tensor, kept from step to step
        self.sums: dict[str, Tensor] = {}
        self.largest: dict[str, int] = {}
        # memory of earlier steps, overwritten by the next: the system would clear new memory first
        self._sums_memory: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Forget the collected gradients; the grids stay."""
        self.sums = {}
        self.largest = {}

    def observe(self, name: str, largest: int) -> None:
        """Update the exponent of the largest contribution to a parameter."""
        self.largest[name] = max(self.largest.get(name, largest), largest)

    def grid(self, name: str) -> int | None:
        """Largest exponent that a contribution may have on the current grid; None if there is no grid yet."""
        return self.grids[name] + HEADROOM if name in self.grids else None

    def sum_of(self, name: str) -> Tensor:
        """The int64 sums of a parameter, to add to in place."""
        if name not in self.sums:
            self.sums[name] = self._memory(name).zero_()
        return self.sums[name]

    def _memory(self, name: str) -> Tensor:
        if name not in self._sums_memory:
            p = self.parameters[name]
            self._sums_memory[name] = torch.empty(p.shape, dtype=torch.int64, device=p.device)
        return self._sums_memory[name]

    def add_linear(self, weight: Tensor, x: Tensor, grad: Tensor, transposed: bool = False) -> None:
        """dW[n, k] += sum_t grad[t, n] x[t, k]; x [T, K] and grad [T, N] float32.

        A `transposed` weight is stored as [K, N]. The integers are sum_t Z[t, n] X[t, k] with X the grid integers of x
        and Z = rne(grad 2^(ex - E - HEADROOM + GRADIENT_BITS)), ex the exponent of x's row.
        """
        name = self.names[id(weight)]
        x_exponents, grad_exponents = input_exponents(x), row_exponents(grad)
        if x_exponents is None or grad_exponents is None:
            raise NumericsError(f"the gradient of {name} is not finite; lower the learning rate")
        self.add_measured(name, x, x_exponents, grad, grad_exponents, transposed)

    def add_measured(
        self, name: str, x: Tensor, x_exponents: Tensor, grad: Tensor, grad_exponents: Tensor, transposed: bool = False
    ) -> None:
        """`add_linear` with known exponents of the rows, int64 [T], results of `products.row_exponents`."""
        largest = largest_product(x_exponents, grad_exponents)
        if largest is None:
            return
        self.observe(name, largest)
        limit = self.grid(name)
        if limit is None or largest > limit:  # the step will be redone
            return
        up, x_up = product_units(x_exponents, grad_exponents, GRADIENT_BITS - limit, OPERAND_BITS)
        # a bound on the integers of this pass: the smaller they are, the longer sums stay exact
        bits = GRADIENT_BITS - max(0, limit - largest)
        fresh = transposed or name not in self.sums  # then the memory is overwritten and need not be cleared
        total = self.sum_of(name) if transposed else self.sums.setdefault(name, self._memory(name))
        out = torch.empty_like(total.t(), memory_format=torch.contiguous_format) if transposed else total
        add_products(grad, up, bits, x, x_up, OPERAND_BITS, out, fresh)
        if transposed:
            total += out.t()

    def add_rows(self, parameter: Tensor, contributions: Tensor, ids: Tensor | None = None) -> None:
        """dp += sum_t contributions[t], or dp[ids[t]] += contributions[t].

        contributions [T, N] float32 or float64, where N is the size of dp or of one of its rows; ids [T] int64.
        """
        name = self.names[id(parameter)]
        exponents = row_exponents(contributions)
        if exponents is None:
            raise NumericsError(f"the gradient of {name} is not finite; lower the learning rate")
        if not (exponents != NOTHING).any():
            return
        self.observe(name, int(exponents.max()))
        limit = self.grid(name)
        if limit is not None:
            add_integer_rows(contributions, exponents, limit, TOTAL_BITS - limit, ids, self.sum_of(name))

    def _observe_all(self, ranks: Ranks) -> None:
        """Make `largest` the largest over all ranks, so that all ranks decide the same."""
        gathered = ranks.gather([self.largest])
        self.largest = {
            name: max(largest[name] for largest in gathered if name in largest)
            for name in self.parameters
            if any(name in largest for largest in gathered)
        }

    def finish(self, ranks: Ranks = ALONE) -> dict[str, Tensor] | None:
        """The float32 gradients over all ranks, or None if a grid did not fit and the step must be redone.

        dW = fl32(I 2^(E + HEADROOM - TOTAL_BITS)), accepted if E - 4 <= E_new <= E + 4 for every tensor. The next call
        overwrites the memory of the result.
        """
        self._observe_all(ranks)
        misfits = {
            name: new
            for name, new in self.largest.items()
            if name not in self.grids or not -WINDOW_BELOW <= new - self.grids[name] <= HEADROOM
        }
        if misfits:
            self.grids = {**self.grids, **misfits}
            return None
        ranks.add_up([self.sum_of(name) for name in self.largest])
        gradients = {}
        for name, parameter in self.parameters.items():
            if name in self.largest:
                unit = 2.0 ** (self.grids[name] + HEADROOM - TOTAL_BITS)
                if name not in self._gradients:
                    self._gradients[name] = torch.empty_like(parameter)
                gradients[name] = _to_float32(self.sums[name], unit, self._gradients[name])
            else:
                gradients[name] = torch.zeros_like(parameter)
        self.grids = {**self.grids, **self.largest}
        return gradients
