"""Parameter gradients as integers: one int64 per parameter, on one power-of-two grid per tensor.

Integer addition is associative, so a gradient does not depend on micro-batches, padding, packing, threads or ranks. The
grid exponent E of a tensor is that of the largest contribution in the previous step; it is optimizer state. If the
largest contribution of this step lies outside the window around E, the step is redone on the right grid; nothing
saturates.

Each contribution to a sum is at most 2^49, so an int64 holds those of a few thousand tokens. In a step with more, a sum
is high 2^42 + low: before low could overflow, its upper part moves to `high`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ppo_repro.errors import NumericsError, UserError
from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic.grid import GRADIENT_BITS, GRADIENT_INPUT_BITS, LIMB_BITS, PRODUCT_BITS
from ppo_repro.numerics.kernels.optimizer import to_float32
from ppo_repro.numerics.products import (
    NOTHING,
    add_integer_rows,
    add_products,
    factor_exponents,
    largest_product,
    product_units,
    row_exponents,
)
from ppo_repro.ranks import ALONE, Ranks

HEADROOM = 3  # how many powers of two a contribution may grow before the step is redone
WINDOW_BELOW = 4  # how many it may shrink
MAX_TOKENS = 1 << 20  # of a step
SUM_BITS = 62  # the lower limb of a sum stays within 2^SUM_BITS
# terms of 2^PRODUCT_BITS that fit together with an emptied lower limb
PIECE = 1 << (SUM_BITS - 1 - PRODUCT_BITS)


def assert_no_wrap(tokens: int) -> None:
    """Raise UserError if a step has more tokens than the integer gradients can hold."""
    if tokens > MAX_TOKENS:
        raise UserError(
            f"ppo.minibatch_size: {tokens} tokens (prompts included) in one optimizer step; "
            f"exact gradients hold up to {MAX_TOKENS}; make it smaller"
        )


def needs_two_limbs(tokens: int) -> bool:
    """Whether a sum over so many tokens could overflow an int64; a tied weight counts each token twice."""
    return 2 * tokens << PRODUCT_BITS > 1 << SUM_BITS


def _normalise(high: Tensor, low: Tensor) -> None:
    """Move all of `low` but its last LIMB_BITS bits to `high`."""
    high += (low >> LIMB_BITS).to(high.dtype)
    low &= (1 << LIMB_BITS) - 1


def _to_float32(integers: Tensor, high: Tensor | None, unit: float) -> Tensor:
    """fl32(fl64(high 2^LIMB_BITS + integers) unit), the sum rounded once; no `high` stands for zeros.

    The result lies in the memory of `integers`: another copy of all gradients would be a seventh of a run's memory.
    """
    out = integers.view(-1).view(torch.float32)[: integers.numel()].view(integers.shape)
    if backend.has_kernels(integers):
        upper = None if high is None else high.view(-1).numpy()
        to_float32(integers.view(-1).numpy(), upper, unit, out.view(-1).numpy())
        return out
    if high is None:
        return out.copy_((integers.to(torch.float64) * unit).to(torch.float32))
    above, below = high.to(torch.int64) + (integers >> LIMB_BITS), integers & ((1 << LIMB_BITS) - 1)
    total = above.to(torch.float64) * 2.0**LIMB_BITS + below.to(torch.float64)
    return out.copy_((total * unit).to(torch.float32))


class GradientAccumulator:
    """Collects the integer gradients of one module's parameters over any number of backward passes."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self.parameters = dict(parameters)
        self.names = {id(p): name for name, p in self.parameters.items()}
        self.shapes = {name: p.shape for name, p in self.parameters.items()}
        self.grids: dict[str, int] = {}  # E of each tensor, kept from step to step
        # memory of earlier steps, overwritten by the next: the system would clear new memory first
        self._sums_memory: dict[str, Tensor] = {}
        self.begin()

    def begin(self, tokens: int = MAX_TOKENS) -> None:
        """Forget the collected gradients; the grids stay. At most `tokens` tokens of all ranks will follow."""
        self.sums: dict[str, Tensor] = {}
        self.high: dict[str, Tensor] = {}  # upper limbs, where a lower one had to be emptied
        self.largest: dict[str, int] = {}
        self._bounds: dict[str, int] = {}  # of the lower limbs that may have to be emptied
        self._long = needs_two_limbs(tokens)

    def release(self) -> None:
        """Free the memory of the sums, at the cost that the next step gets new memory; the grids stay."""
        self._sums_memory = {}
        self.begin()

    def observe(self, name: str, largest: int) -> None:
        """Update the exponent of a parameter's largest contribution."""
        self.largest[name] = max(self.largest.get(name, largest), largest)

    def grid(self, name: str) -> int | None:
        """Largest exponent that a contribution may have on the current grid; None if there is no grid yet."""
        return self.grids[name] + HEADROOM if name in self.grids else None

    def sum_of(self, name: str, terms: int = 0, bits: int = PRODUCT_BITS) -> Tensor:
        """The int64 sums of a parameter, to add `terms` terms of at most 2^bits to in place; up to PIECE of 2^49."""
        if name not in self.sums:
            self.sums[name] = self._memory(name).zero_()
        self._reserve(name, terms << bits)
        return self.sums[name]

    def _memory(self, name: str) -> Tensor:
        if name not in self._sums_memory:
            device = self.parameters[name].device
            self._sums_memory[name] = torch.empty(self.shapes[name], dtype=torch.int64, device=device)
        return self._sums_memory[name]

    def _has_two_limbs(self, name: str) -> bool:
        """Whether the sums of a parameter may overflow, the same on every rank.

        A bias or norm has few numbers, but a norm of heads has a contribution from each head of a token.
        """
        return self._long or len(self.shapes[name]) < 2

    def _reserve(self, name: str, bound: int) -> None:
        """Make room for sums of at most `bound` in the lower limb."""
        if not self._has_two_limbs(name):
            return
        if self._bounds.get(name, 0) + bound > 1 << SUM_BITS:
            self._empty(name)
        self._bounds[name] = self._bounds.get(name, 0) + bound

    def _empty(self, name: str) -> None:
        """high += low >> LIMB_BITS, and only the rest stays in low."""
        low = self.sums[name]
        if name not in self.high:
            # 2^20 tokens of 2^50 fit 31 bits and the lower limb; the norm of a hundred heads needs more
            dtype = torch.int64 if low.dim() < 2 else torch.int32
            self.high[name] = torch.zeros(low.shape, dtype=dtype, device=low.device)
        _normalise(self.high[name], low)
        self._bounds[name] = 1 << LIMB_BITS

    def add_linear(
        self, weight: Tensor, x: Tensor, grad: Tensor, transposed: bool = False, part: int | None = None
    ) -> None:
        """dW[n, k] += sum_t grad[t, n] x[t, k]; x [T, K] and grad [T, N] float32.

        A `transposed` weight is stored as [K, N]. Of a weight [P, N, K] with `part` it is dW[part], on the one grid of
        the whole tensor, and no token may come twice to a part. The integers are sum_t Z[t, n] X[t, k] with
        X = rne(x 2^(22 - ex)) and Z = rne(grad 2^(ex - E - HEADROOM + 27)), ex the exponent of x's row.
        """
        name = self.names[id(weight)]
        x_exponents, grad_exponents = factor_exponents(name, x, grad)
        self.add_measured(name, x, x_exponents, grad, grad_exponents, transposed, part)

    def add_measured(
        self,
        name: str,
        x: Tensor,
        x_exponents: Tensor,
        grad: Tensor,
        grad_exponents: Tensor,
        transposed: bool = False,
        part: int | None = None,
    ) -> None:
        """`add_linear` with known exponents of the rows, int64 [T], results of `products.row_exponents`."""
        largest = largest_product(x_exponents, grad_exponents)
        if largest is None:
            return
        self.observe(name, largest)
        limit = self.grid(name)
        if limit is None or largest > limit:  # the step will be redone
            return
        up, x_up = product_units(x_exponents, grad_exponents, GRADIENT_BITS - limit, GRADIENT_INPUT_BITS)
        # a bound on the integers of this pass: the smaller they are, the longer sums stay exact
        bits = max(0, GRADIENT_BITS - max(0, limit - largest))
        piece = 1 << (SUM_BITS - 1 - GRADIENT_INPUT_BITS - bits) if self._long else len(x)
        for start in range(0, len(x), piece):
            rows = slice(start, start + piece)
            self._add_piece(name, x[rows], x_up[rows], grad[rows], up[rows], bits, transposed, part)

    def _add_piece(
        self,
        name: str,
        x: Tensor,
        x_up: Tensor,
        grad: Tensor,
        up: Tensor,
        bits: int,
        transposed: bool,
        part: int | None,
    ) -> None:
        """Add rows whose sums fit into an emptied lower limb."""
        # then the memory is overwritten and need not be cleared
        fresh = transposed or (part is None and name not in self.sums)
        if fresh and not transposed:
            self.sums[name] = self._memory(name)
        whole = self.sum_of(name, len(x), bits + GRADIENT_INPUT_BITS)
        total = whole if part is None else whole[part]
        out = torch.empty_like(total.t(), memory_format=torch.contiguous_format) if transposed else total
        add_products(grad, up, bits, x, x_up, GRADIENT_INPUT_BITS, out, fresh)
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
        if limit is None:
            return
        for start in range(0, len(exponents), PIECE):
            rows = slice(start, start + PIECE)
            sums = self.sum_of(name, len(exponents[rows]))
            places = None if ids is None else ids[rows]
            add_integer_rows(contributions[rows], exponents[rows], limit, PRODUCT_BITS - limit, places, sums)

    def total(self, name: str) -> Tensor:
        """The sum of a parameter as it is now, float64: fl64(high 2^LIMB_BITS + low) on its grid; zeros without any."""
        if name not in self.sums:
            return torch.zeros(self.shapes[name], dtype=torch.float64, device=self.parameters[name].device)
        low, high = self.sums[name], self.high.get(name)
        above = low >> LIMB_BITS if high is None else high.to(torch.int64) + (low >> LIMB_BITS)
        below = low & ((1 << LIMB_BITS) - 1)
        unit = 2.0 ** (self.grids[name] + HEADROOM - PRODUCT_BITS)
        return (above.to(torch.float64) * 2.0**LIMB_BITS + below.to(torch.float64)) * unit

    def _observe_all(self, ranks: Ranks) -> None:
        """Make `largest` the largest over all ranks, so that all ranks decide the same."""
        gathered = ranks.everyone(self.largest)
        found = {n: [largest[n] for largest in gathered if n in largest] for n in self.parameters}
        self.largest = {name: max(of_ranks) for name, of_ranks in found.items() if of_ranks}

    def _limbs(self, ranks: Ranks) -> list[tuple[dict[str, Tensor], str]]:
        """The sums to add up over all ranks, by the dictionary that holds them; zeros on a rank that added nothing."""
        for name in self.largest:
            self.sum_of(name)
            if ranks.size > 1 and self._has_two_limbs(name):
                self._empty(name)
        lower = [(self.sums, name) for name in self.largest]
        return lower + [(self.high, name) for name in self.largest if ranks.size > 1 and self._has_two_limbs(name)]

    def finish(self, ranks: Ranks = ALONE) -> dict[str, Tensor] | None:
        """The float32 gradients over all ranks, or None if a grid did not fit and the step must be redone.

        dW = fl32(I 2^(E + HEADROOM - 49)), accepted if E - 4 <= E_new <= E + 3 for every tensor. They take the place
        of the sums; the next step overwrites them.
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
        ranks.add_up([held[name] for held, name in self._limbs(ranks)])
        gradients = {}
        for name, parameter in self.parameters.items():
            if name in self.largest:
                unit = 2.0 ** (self.grids[name] + HEADROOM - PRODUCT_BITS)
                gradients[name] = _to_float32(self.sums.pop(name), self.high.get(name), unit)
            else:
                gradients[name] = torch.zeros_like(parameter.detach())
        self.grids = {**self.grids, **self.largest}
        return gradients
