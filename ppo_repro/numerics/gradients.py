"""Parameter gradients as integers: one int64 per parameter, on one power-of-two grid per tensor.

Integers add associatively, so a gradient does not depend on micro-batches, padding, packing, threads or
ranks. The grid exponent E of a tensor comes from the previous step's exact largest contribution and is
optimizer state. Where the new largest contribution has left the window around E, the step is done again
on the right grid; nothing saturates.
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

GRADIENT_BITS = 26  # bits of a quantised output gradient
HEADROOM = 4  # how many powers of two a contribution may grow before the step is redone
WINDOW_BELOW = 4  # how many it may shrink


def assert_no_wrap(tokens: int, total_bits: int) -> None:
    """Raise UserError if a sum over `tokens` tokens could leave int64; a tied weight counts twice."""
    if total_bits + ceil_log2(2 * tokens) > 62:
        raise UserError(
            f"ppo.minibatch_size: {tokens} tokens (prompts included) in one optimizer step; "
            f"exact gradients hold up to {1 << (61 - total_bits)}; make it smaller"
        )


def _to_float32(integers: Tensor, unit: float, out: Tensor) -> Tensor:
    if backend.has_kernels(integers):
        to_float32(integers.view(-1).numpy(), unit, out.view(-1).numpy())
        return out
    return out.copy_(integers.to(torch.float64) * unit)


class GradientAccumulator:
    """Collects the integer gradients of one module's parameters over any number of backward passes."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], operand_bits: int = OPERAND_BITS) -> None:
        self.parameters = dict(parameters)
        self.names = {id(p): name for name, p in self.parameters.items()}
        self.operand_bits, self.total_bits = operand_bits, GRADIENT_BITS + operand_bits
        self.grids: dict[str, int] = {}  # E of each tensor: state that outlives the step
        self.sums: dict[str, Tensor] = {}
        self.largest: dict[str, int] = {}
        # of earlier steps, int64 and float32: memory asked for anew is cleared page by page
        self._room: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Forget what has been collected; the grids stay."""
        self.sums = {}
        self.largest = {}

    def observe(self, name: str, largest: int) -> None:
        """Take note of the exponent of the largest contribution to a parameter in one pass."""
        self.largest[name] = max(self.largest.get(name, largest), largest)

    def grid(self, name: str) -> int | None:
        """Largest exponent that contributions may have on the current grid, None if there is no grid yet."""
        return self.grids[name] + HEADROOM if name in self.grids else None

    def sum_of(self, name: str) -> Tensor:
        """The int64 sums of a parameter, to be added to."""
        if name not in self.sums:
            self.sums[name] = self._memory(name).zero_()
        return self.sums[name]

    def _memory(self, name: str) -> Tensor:
        if name not in self._room:
            p = self.parameters[name]
            self._room[name] = torch.empty(p.shape, dtype=torch.int64, device=p.device)
        return self._room[name]

    def add_linear(self, weight: Tensor, x: Tensor, grad: Tensor, transposed: bool = False) -> None:
        """dW[n, k] += sum_t grad[t, n] x[t, k]; x [T, K] and grad [T, N] float32.

        A `transposed` weight is stored as [K, N].

        Z = rne(grad 2^(ex - E - h + zb)) with ex the exponent of x's row; integers sum_t Z X.
        """
        name = self.names[id(weight)]
        x_exponents, grad_exponents = input_exponents(x), row_exponents(grad)
        if x_exponents is None or grad_exponents is None:
            raise NumericsError(f"the gradient of {name} is not finite; lower the learning rate")
        self.add_measured(name, x, x_exponents, grad, grad_exponents, transposed)

    def add_measured(
        self, name: str, x: Tensor, x_exponents: Tensor, grad: Tensor, grad_exponents: Tensor, transposed: bool = False
    ) -> None:
        """`add_linear` where the exponents of the rows, int64 [T] as of `products.row_exponents`, are known."""
        largest = largest_product(x_exponents, grad_exponents)
        if largest is None:
            return
        self.observe(name, largest)
        limit = self.grid(name)
        if limit is None or largest > limit:  # the step will be done again
            return
        up, x_up = product_units(x_exponents, grad_exponents, GRADIENT_BITS - limit, self.operand_bits)
        # a bound on the integers of this pass: the smaller they are, the longer sums stay exact
        bits = GRADIENT_BITS - max(0, limit - largest)
        fresh = transposed or name not in self.sums  # then nothing has to be cleared, only to be written
        total = self.sum_of(name) if transposed else self.sums.setdefault(name, self._memory(name))
        out = torch.empty_like(total.t(), memory_format=torch.contiguous_format) if transposed else total
        add_products(grad, up, bits, x, x_up, self.operand_bits, out, fresh)
        if transposed:
            total += out.t()

    def add_rows(self, parameter: Tensor, contributions: Tensor, ids: Tensor | None = None) -> None:
        """dp += sum_t contributions[t], or dp[ids[t]] += contributions[t].

        contributions [T, N] float32 or float64, N the elements of dp or of a row of it; ids [T] int64.
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
            add_integer_rows(contributions, exponents, limit, self.total_bits - limit, ids, self.sum_of(name))

    def _observe_all(self, ranks: Ranks) -> None:
        """Make `largest` the largest over all ranks: the same decision follows everywhere."""
        found = ranks.gather([self.largest])
        self.largest = {
            name: max(largest[name] for largest in found if name in largest)
            for name in self.parameters
            if any(name in largest for largest in found)
        }

    def finish(self, ranks: Ranks = ALONE) -> dict[str, Tensor] | None:
        """The float32 gradients over all ranks, or None if a grid did not fit and the step must be done again.

        Their memory is that of the next ones.
        dW = fl32(I 2^(E + h - zb - p)). Accepted iff E - 4 <= E_new <= E + 4 for every tensor.
        """
        self._observe_all(ranks)
        off = {
            name: new
            for name, new in self.largest.items()
            if name not in self.grids or not -WINDOW_BELOW <= new - self.grids[name] <= HEADROOM
        }
        if off:
            self.grids = {**self.grids, **off}
            return None
        ranks.add_up([self.sum_of(name) for name in self.largest])
        gradients = {}
        for name, parameter in self.parameters.items():
            if name in self.largest:
                unit = 2.0 ** (self.grids[name] + HEADROOM - self.total_bits)
                if name not in self._gradients:
                    self._gradients[name] = torch.empty_like(parameter)
                gradients[name] = _to_float32(self.sums[name], unit, self._gradients[name])
            else:
                gradients[name] = torch.zeros_like(parameter)
        self.grids = {**self.grids, **self.largest}
        return gradients
