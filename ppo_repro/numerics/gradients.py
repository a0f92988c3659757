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
from ppo_repro.kernels.optimizer import to_float32
from ppo_repro.numerics import backend
from ppo_repro.numerics.elementwise import pow2
from ppo_repro.numerics.grid import MANTISSA_BITS, OPERAND_BITS, ceil_log2, exponent

GRADIENT_BITS = 26  # bits of a quantised output gradient
HEADROOM = 4  # how many powers of two a contribution may grow before the step is redone
WINDOW_BELOW = 4  # how many it may shrink
TOTAL_BITS = GRADIENT_BITS + OPERAND_BITS
CHUNK = 1 << (MANTISSA_BITS - TOTAL_BITS)  # tokens per matrix product that is exact in float64


def assert_no_wrap(tokens: int) -> None:
    """Raise UserError if a sum over `tokens` tokens could leave int64; a tied weight counts twice."""
    if TOTAL_BITS + ceil_log2(2 * tokens) > 62:
        raise UserError(
            f"ppo.minibatch_size: {tokens} tokens (prompts included) in one optimizer step; "
            f"exact gradients hold up to {1 << (61 - TOTAL_BITS)}; make it smaller"
        )


def _to_float32(integers: Tensor, unit: float) -> Tensor:
    if backend.has_kernels(integers):
        return torch.from_numpy(to_float32(integers.view(-1).numpy(), unit)).view(integers.shape)
    return (integers.to(torch.float64) * unit).to(torch.float32)


class GradientAccumulator:
    """Collects the integer gradients of one module's parameters over any number of backward passes."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self.parameters = dict(parameters)
        self.names = {id(p): name for name, p in self.parameters.items()}
        self.grids: dict[str, int] = {}  # E of each tensor: state that outlives the step
        self.sums: dict[str, Tensor] = {}
        self.largest: dict[str, int] = {}

    def begin(self) -> None:
        """Forget what has been collected; the grids stay."""
        self.sums = {}
        self.largest = {}

    def _observe(self, name: str, exponents: Tensor) -> None:
        if exponents.numel():
            self.largest[name] = max(self.largest.get(name, -(10**6)), int(exponents.max()))

    def _finite(self, name: str, largest: Tensor) -> Tensor:
        if not torch.isfinite(largest).all():
            raise NumericsError(f"the gradient of {name} is not finite; lower the learning rate")
        return largest

    def _sum(self, name: str) -> Tensor:
        if name not in self.sums:
            p = self.parameters[name]
            self.sums[name] = torch.zeros(p.shape, dtype=torch.int64, device=p.device)
        return self.sums[name]

    def add_linear(self, weight: Tensor, x: tuple[Tensor, Tensor], grad: Tensor) -> None:
        """dW[n, k] += sum_t grad[t, n] x[t, k]. x: grid of 20 bits and scale, [T, K]; grad float32 [T, N].

        Z = rne(grad 2^(ex - E - h + zb)) with ex the exponent of x's row; integers sum_t Z X.
        """
        name = self.names[id(weight)]
        integers, scale = x
        x_exponent = torch.frexp(scale[:, 0])[1].to(torch.int64) - 1 + OPERAND_BITS
        largest = self._finite(name, grad.abs().amax(-1))
        live = ((largest > 0) & (integers.abs().amax(-1) > 0)).nonzero()[:, 0]
        self._observe(name, exponent(largest[live]) + x_exponent[live])
        if name not in self.grids or not live.numel():
            return
        shift = x_exponent[live] - self.grids[name] - HEADROOM + GRADIENT_BITS
        z = (grad[live].to(torch.float64) * pow2(shift)[:, None]).round_()
        kept, total = integers[live], self._sum(name)
        for start in range(0, len(live), CHUNK):
            total += (z[start : start + CHUNK].t() @ kept[start : start + CHUNK]).to(torch.int64)

    def _rows(self, name: str, contributions: Tensor) -> Tensor | None:
        largest = self._finite(name, contributions.abs().amax(-1))
        self._observe(name, exponent(largest[largest > 0]))
        if name not in self.grids:
            return None
        unit = 2.0 ** (TOTAL_BITS - self.grids[name] - HEADROOM)
        return (contributions * unit).round_().to(torch.int64)

    def add_rows(self, parameter: Tensor, contributions: Tensor) -> None:
        """dp += sum_t contributions[t]. Float64 [T, N] for a parameter of N elements."""
        name = self.names[id(parameter)]
        integers = self._rows(name, contributions)
        if integers is not None:
            self._sum(name).add_(integers.sum(0).view(parameter.shape))

    def add_embedding(self, weight: Tensor, ids: Tensor, grad: Tensor) -> None:
        """dW[ids[t]] += grad[t]. ids int64 [T], grad float32 [T, H]."""
        name = self.names[id(weight)]
        integers = self._rows(name, grad.to(torch.float64))
        if integers is not None:
            self._sum(name).index_add_(0, ids, integers)

    def finish(self) -> dict[str, Tensor] | None:
        """The float32 gradients, or None if a grid did not fit and the step must be done again.

        dW = fl32(I 2^(E + h - zb - p)). Accepted iff E - 4 <= E_new <= E + 4 for every tensor.
        """
        off = {
            name: new
            for name, new in self.largest.items()
            if name not in self.grids or not -WINDOW_BELOW <= new - self.grids[name] <= HEADROOM
        }
        if off:
            self.grids = {**self.grids, **off}
            return None
        gradients = {}
        for name, parameter in self.parameters.items():
            if name in self.sums:
                unit = 2.0 ** (self.grids[name] + HEADROOM - TOTAL_BITS)
                gradients[name] = _to_float32(self.sums[name], unit)
            else:
                gradients[name] = torch.zeros_like(parameter)
        self.grids = {**self.grids, **self.largest}
        return gradients
