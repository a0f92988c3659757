"""Parameter gradients as exact sums over any number of backward passes, for callers that cannot redo a step.

`GradientAccumulator` puts all contributions to a tensor on one grid, and a step whose grid does not fit is redone. A
caller that owns the training loop calls `backward` as often as it likes, and no pass knows the next one. So here each
token's contribution lies on a grid that follows from the token alone: its exponent, rounded up to a multiple of
BIN_BITS. Each such bin is a sum of integers, and the bins are added up when the gradient is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.gradients import HEADROOM, MAX_TOKENS, GradientAccumulator
from ppo_repro.numerics.products import NOTHING, factor_exponents, row_exponents

BIN_BITS = 8  # of exponents in a bin: a contribution keeps 27 - 8 bits at least
# bins below the highest one that count: the others hold contributions below 2^-24 of the largest, as float32 drops them
LOWER_BINS = 3


def _bins(exponents: Tensor) -> Tensor:
    """The number of the bin of each exponent, int64: its exponents go up to BIN_BITS times that."""
    return -((-exponents) // BIN_BITS)


class GradientBins:
    """Collects the integer gradients of one module's parameters, each in up to LOWER_BINS + 1 bins."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self.parameters = dict(parameters)
        self.names = {id(p): name for name, p in self.parameters.items()}
        self._bins: dict[str, dict[int, GradientAccumulator]] = {name: {} for name in self.parameters}

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientBins:
        """Empty bins of the copied parameters."""
        copied = GradientBins((name, deepcopy(p, memo)) for name, p in self.parameters.items())
        memo[id(self)] = copied
        return copied

    def forget(self, name: str) -> None:
        """Drop what was collected of a parameter."""
        self._bins[name] = {}

    def add_linear(
        self, weight: Tensor, x: Tensor, grad: Tensor, transposed: bool = False, part: int | None = None
    ) -> None:
        """dW[n, k] += sum_t grad[t, n] x[t, k]; x [T, K] and grad [T, N] float32. As in `GradientAccumulator`."""
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
        sums = (x_exponents + grad_exponents).masked_fill(
            (x_exponents == NOTHING) | (grad_exponents == NOTHING), NOTHING
        )
        for target, rows in self._shares(name, sums):
            if rows is None:
                target.add_measured(name, x, x_exponents, grad, grad_exponents, transposed, part)
            else:
                share = x[rows], x_exponents[rows], grad[rows], grad_exponents[rows]
                target.add_measured(name, *share, transposed, part)

    def add_rows(self, parameter: Tensor, contributions: Tensor, ids: Tensor | None = None) -> None:
        """dp += sum_t contributions[t], or dp[ids[t]] += contributions[t]. As in `GradientAccumulator`."""
        name = self.names[id(parameter)]
        exponents = row_exponents(contributions)
        if exponents is None:
            raise NumericsError(f"the gradient of {name} is not finite; lower the learning rate")
        for target, rows in self._shares(name, exponents):
            if rows is None:
                target.add_rows(parameter, contributions, ids)
            else:
                target.add_rows(parameter, contributions[rows], None if ids is None else ids[rows])

    def _shares(self, name: str, exponents: Tensor) -> list[tuple[GradientAccumulator, Tensor | None]]:
        """Each bin with its rows, None for all rows; bins too far below the highest one are dropped."""
        bins = _bins(exponents).masked_fill_(exponents == NOTHING, NOTHING)
        found = [int(b) for b in bins.unique() if int(b) != NOTHING]
        if not found:
            return []
        held = self._bins[name]
        lowest = max([*found, *held]) - LOWER_BINS
        for number in [number for number in held if number < lowest]:
            del held[number]
        return [
            (self._bin(name, number), None if bool((bins == number).all()) else torch.nonzero(bins == number)[:, 0])
            for number in found
            if number >= lowest
        ]

    def _bin(self, name: str, number: int) -> GradientAccumulator:
        held = self._bins[name]
        if number not in held:
            held[number] = GradientAccumulator([(name, self.parameters[name])])
            held[number].grids[name] = number * BIN_BITS - HEADROOM
            held[number].begin(MAX_TOKENS)
        return held[number]

    def gradient(self, name: str) -> Tensor:
        """fl32(sum over all bins), the bins added up in float64 from the lowest one; the bins stay.

        No bin's sum depends on the order of its contributions, so neither does the result.
        """
        parameter = self.parameters[name]
        total = torch.zeros(parameter.shape, dtype=torch.float64, device=parameter.device)
        for _, held in sorted(self._bins[name].items(), key=lambda item: item[0]):
            total += held.total(name)
        return total.to(torch.float32)


Gradients = GradientAccumulator | GradientBins
