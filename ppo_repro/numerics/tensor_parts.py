"""Which parameters of a module this process holds a part of, and how they become whole tensors and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ppo_repro.numerics.arithmetic.divided import Holders
from ppo_repro.numerics.pieces import Divided, Division
from ppo_repro.ranks import ALONE
from ppo_repro.shares import pieces


@dataclass(frozen=True)
class Slab(Divided):
    """A tensor of which this process holds neighbouring rows, or columns."""

    dim: int

    def whole(self) -> Tensor:
        return torch.cat(self.ranks.gather([self.piece.detach().clone()]), self.dim)


@dataclass(frozen=True)
class Owned(Divided):
    """A tensor that one process has, and the others nothing of."""

    owner: int

    def whole(self) -> Tensor:
        mine = [self.piece.detach().clone()] if self.ranks.rank == self.owner else []
        return self.ranks.gather(mine)[0]


@dataclass(frozen=True)
class TensorParts:
    """The parameters of a module by name: what of them the processes that hold one copy of it together divide."""

    holders: Holders = ALONE
    dims: Mapping[str, int] = field(default_factory=dict)  # divided along this dimension
    sizes: Mapping[str, int] = field(default_factory=dict)  # of that dimension, of the whole tensor
    # whole on each process, which sees a part of the contributions to its gradient
    summed: frozenset[str] = frozenset()
    flat: Mapping[str, torch.Size] = field(default_factory=dict)  # divided as they lie, and the shape of all of it
    owners: Mapping[str, tuple[int, torch.Size]] = field(default_factory=dict)  # with one process, empty elsewhere

    @property
    def divides(self) -> bool:
        """Whether there is anything to divide."""
        return self.holders.size > 1

    def gradient_shape(self, name: str, parameter: Tensor) -> torch.Size:
        """The shape of what a backward pass of this process adds up for a parameter."""
        return self.flat.get(name, parameter.shape)

    def stepped(self, name: str, held: Tensor, division: Division) -> Tensor:
        """What the optimizer of this process steps of what it holds of a tensor, in the same memory."""
        return held if name in self.flat else division.own(held)

    def held(self, name: str, tensor: Tensor) -> Tensor | Divided:
        """What this process holds of a tensor that is laid out as the parameter `name`."""
        if name in self.flat:
            return Divided(tensor, self.flat[name], self.holders)
        if name in self.owners:
            owner, shape = self.owners[name]
            return Owned(tensor, shape, self.holders, owner)
        dim = self.dims.get(name)
        if dim is None:
            return tensor
        sizes = [*tensor.shape]
        sizes[dim] = self.sizes[name]
        return Slab(tensor, torch.Size(sizes), self.holders, dim)

    def own(self, name: str, whole: Tensor) -> Tensor:
        """This process's part of a whole tensor, in its memory; ValueError for one of another size."""
        owner, shape = self.owners.get(name, (None, self.flat.get(name)))
        if shape is not None:
            if whole.shape != shape:
                raise ValueError(f"tensor {name} is {list(whole.shape)}, expected {list(shape)}")
            if owner == self.holders.rank:
                return whole
            place = pieces(whole.numel() if owner is None else 0, self.holders.size)[self.holders.rank]
            return whole.contiguous().view(-1)[place.start : place.stop]
        dim = self.dims.get(name)
        if dim is None:
            return whole
        if whole.dim() <= dim or whole.shape[dim] != self.sizes[name]:
            raise ValueError(f"tensor {name} is {list(whole.shape)}, and should have {self.sizes[name]} in place {dim}")
        part = pieces(self.sizes[name], self.holders.size)[self.holders.rank]
        return whole.narrow(dim, part.start, len(part))

    def counted_once(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors, but empty where another process counts the same numbers: for sums over all of them."""
        if self.holders.rank == 0:
            return dict(tensors)
        divided = {*self.dims, *self.owners}
        return {name: t if name in divided else t.reshape(-1)[:0] for name, t in tensors.items()}

    def whole(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The whole tensors, one after the other; all processes that hold parts must ask for them."""
        for name, tensor in named:
            held = self.held(name, tensor.detach())
            yield name, held.whole() if isinstance(held, Divided) else held


UNDIVIDED = TensorParts()
