"""Rows of which several processes hold one part each: what grids and exact sums over them need of the others.

A grid needs the largest number of the whole row, and a sum all of its terms. The maximum of exponents and the sum of
integers have no order, and the rounding comes after them, so the result has the bits that one process has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Holders(Protocol):
    """The processes that hold the parts; all of them call the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, values: Sequence[T], /) -> list[T]:
        """The values of all of them, in their order."""
        ...

    def add_up(self, tensors: Sequence[Tensor], /) -> None:
        """Replace each tensor of integers by its sum over all of them."""
        ...


@dataclass(frozen=True)
class Share:
    """The part of rows of `length` numbers that one process holds: numbers start..stop-1. Parts lie in rank order."""

    holders: Holders
    start: int
    stop: int
    length: int

    def largest(self, x: Tensor) -> Tensor:
        """The elementwise maximum over all processes."""
        return torch.stack(self.holders.gather([x.detach()])).amax(0)

    def joined(self, x: Tensor) -> Tensor:
        """What all processes hold, one after the other along the last dimension."""
        return torch.cat(self.holders.gather([x.detach().clone()]), -1)  # a view would be sent with all of its memory

    def add_up(self, *integers: Tensor) -> None:
        """Replace each tensor of integers by its sum over all processes."""
        self.holders.add_up(integers)

    def own(self, x: Tensor, dim: int = -1) -> Tensor:
        """This process's part of a whole tensor, along `dim`, in its memory."""
        return x.narrow(dim, self.start, self.stop - self.start)

    def spread(self, bits: Tensor, owned: Tensor) -> Tensor:
        """Float32 numbers where the one process that has `owned` set holds them, to the bit, on all processes."""
        found = bits.detach().contiguous().view(torch.int32).masked_fill(~owned, 0)
        self.add_up(found)
        return found.view(torch.float32)
