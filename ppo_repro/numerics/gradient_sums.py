"""Manage the memory of a minibatch's gradients: partial sums by slots of sequences, to which the kernels add.

Sequence i of S is in slot ((i + 1) slots - 1) // S. A slot's sum is a chain over its sequences. The slots are joined as
the binary tree ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). So micro-batches and processes never change a bit.

A complete subtree waits in an array for its sibling. Between two micro-batches at most log2(slots) + 1 arrays are
in memory. With one backward pass there is one array.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ppo_repro.base.errors import PromiseBroken
from ppo_repro.base.ranks import ALONE
from ppo_repro.numerics.devices import kernels_of
from ppo_repro.numerics.interface import Struct, constants, ffi, pointer
from ppo_repro.numerics.shards import Shards, divided

MAX_LEVELS = constants.MAX_LEVELS
_ALIGNED = 16  # floats

Slots = Sequence[int] | np.ndarray
_Key = tuple[str, tuple[tuple[str, ...], ...]]  # a label, and the parameters' names in groups
Group = Sequence[Tensor]  # parameters that are one matrix for the kernels, for example queries, keys and values


def gradient_offsets(groups: Iterable[Group]) -> tuple[dict[int, int], int]:
    """Return the offset of each parameter's gradient by `id`, and the size of all gradients, both in floats.

    The gradients of a group are consecutive, and get memory if one of its parameters is trained.
    """
    offsets: dict[int, int] = {}
    size = 0
    for group in groups:
        if any(p.requires_grad for p in group):
            for p in group:
                offsets[id(p)] = size
                size += p.numel()
            size = -(-size // _ALIGNED) * _ALIGNED
    return offsets, size


class SlotSums:
    """Gradients of one use of some parameters. A parameter that is used twice has two sums, joined at the end."""

    def __init__(self, groups: Sequence[Group], slots: int) -> None:
        self._alive = [p for group in groups for p in group]  # keeps the parameters alive, because their ids are keys
        self.parameters = [p for p in self._alive if p.requires_grad]
        self.device = self._alive[0].device
        for p in self.parameters:
            if p.dtype != torch.float32 or not p.is_contiguous() or p.device != self.device:
                raise ValueError(f"a parameter to train is {p.dtype} on {p.device}, strides {p.stride()}")
        self._offsets, self.size = gradient_offsets(groups)
        self.levels = slots.bit_length() - 1
        self._arrays: list[Tensor | None] = [None] * (self.levels + 1)
        self.begin()

    def begin(self) -> None:
        """Forget all sums."""
        self._slot, self._is_open = 0, False  # first incomplete slot; whether level 0 has a part of it

    def release(self) -> None:
        """Free the memory of all sums."""
        self._arrays = [None] * (self.levels + 1)
        self.begin()

    def offset(self, *parts: Tensor) -> int:
        """Return the offset of the gradient of a matrix, in floats; -1 if the matrix is not trained.

        `parts` are the parameters of the matrix, in the order of their group.
        """
        if not any(p.requires_grad for p in parts):
            return -1
        return self._offsets[id(parts[0])]

    @contextmanager
    def adding(self, slots: Slots) -> Iterator[Struct]:
        """Yield the C struct with the memory to which one backward pass adds the gradients of its S sequences.

        `slots` [S + 1] has the slot of each sequence, and of the sequence after them; the number of slots if no
        sequence follows. PromiseBroken if a sequence comes after a later one, ValueError if there is none.
        """
        *of_pass, last = (int(slot) for slot in slots)
        if not of_pass:
            raise ValueError("a backward pass without sequences")
        if of_pass[0] < self._slot:
            raise PromiseBroken(f"a sequence of slot {of_pass[0]} comes after those of slot {self._slot}")
        stays_open = of_pass[-1] == last
        first, is_open = self._slot, self._is_open
        self._slot, self._is_open = last, stays_open
        yield self._sums(first, is_open, last, stays_open)

    def total(self) -> Tensor:
        """Return the sums over all slots, flat [size], after the last backward pass."""
        sums = self._sums(self._slot, self._is_open, self._slot, self._is_open)
        kernels_of(self.device).join_sums(sums, self.size)
        self._slot, self._is_open = 1 << self.levels, False
        return self._array(0)

    def view(self, parameter: Tensor) -> Tensor:
        """Return the gradient of a trained parameter as a view of level 0."""
        offset = self._offsets[id(parameter)]
        return self._array(0)[offset : offset + parameter.numel()].view(parameter.shape)

    def _sums(self, first: int, is_open: bool, last: int, stays_open: bool) -> Struct:
        """Return the C struct of a pass, with memory for the subtrees at its beginning and end.

        Args:
            first, is_open: the slot with which the pass begins, and whether level 0 already has a part of the slot's
                sum.
            last, stays_open: the slot after the pass, and whether level 0 then has a part of its sum.
        """
        members = dict(levels=self.levels, first=first, open=is_open, last=last, stays_open=stays_open)
        sums = ffi.new("Sums *", members)
        sums.level[0] = pointer(self._array(0), self.device)
        for i in range(self.levels):
            if (first | last) >> i & 1:
                sums.level[i + 1] = pointer(self._array(i + 1), self.device)
        return sums

    def _array(self, level: int) -> Tensor:
        """Return the memory [size] of a level, zeros at first."""
        array = self._arrays[level]
        if array is None:
            array = self._arrays[level] = torch.zeros(self.size, device=self.device)
        return array


class GradientSums:
    """Gradients of a module's parameters over one minibatch, summed over its backward passes and over ranks."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], slots: int, shards: Shards | None = None) -> None:
        """Collect gradients in `slots` slots of this rank, a power of two. Only trained parameters have gradients.

        Without `shards` this process owns all gradients.
        """
        if slots not in {1 << i for i in range(MAX_LEVELS)}:
            raise ValueError(f"{slots} slots; a power of two up to {1 << (MAX_LEVELS - 1)} is possible")
        self.slots, self._all = slots, dict(parameters)
        self.trained = {name: p for name, p in self._all.items() if p.requires_grad}
        self._shards = shards or divided(self.trained, ALONE)
        self._names = {id(p): name for name, p in self._all.items()}
        self._slot_sums: dict[_Key, SlotSums] = {}
        self._used: set[_Key] = set()  # since `begin`

    def sums_for(self, label: str, *groups: Group) -> SlotSums:
        """Return the sums of one use of some parameters. Two uses of a parameter need different labels."""
        key = label, tuple(tuple(self._names[id(p)] for p in group) for group in groups)
        if key not in self._slot_sums:
            self._slot_sums[key] = self.make_sums(groups)
        self._used.add(key)
        return self._slot_sums[key]

    def make_sums(self, groups: Sequence[Group]) -> SlotSums:
        """Return empty sums for one use of some parameters."""
        return SlotSums(groups, self.slots)

    def begin(self) -> None:
        """Forget the sums of the last minibatch."""
        self._used.clear()
        for slot_sums in self._slot_sums.values():
            slot_sums.begin()

    def release(self) -> None:
        """Free the memory of all sums until the next backward pass."""
        for slot_sums in self._slot_sums.values():
            slot_sums.release()

    def finish(self) -> dict[str, Tensor]:
        """Return the gradient of each trained parameter over all ranks, float32, in the memory of the sums.

        Of a parameter that several ranks divide, it has the elements that this rank owns, flat. Ranks have equally many
        slots, in rank order. Raises ValueError if no pass has added to the sums.
        """
        shards = self._shards
        # a rank without sequences has no uses of its own
        keys = sorted({key for of_rank in shards.ranks.everyone(sorted(self._used)) for key in of_rank})
        if not keys:
            raise ValueError(
                "no backward pass added to these sums; lay out its batch with `.with_sums(optimizer.sink)`"
            )
        gradients: dict[str, Tensor] = {}
        for label, names in keys:
            slot_sums = self.sums_for(label, *(tuple(self._all[name] for name in group) for group in names))
            slot_sums.total()
            totals = {self._names[id(p)]: slot_sums.view(p) for p in slot_sums.parameters}
            shards.add_up({name: total.view(-1) for name, total in totals.items()})
            for name, total in totals.items():
                shard = shards.own_shard(name, total)
                gradients[name] = gradients[name].add_(shard) if name in gradients else shard
        unused = self.trained.keys() - gradients.keys()
        return gradients | {name: torch.zeros_like(shards.own_shard(name, self.trained[name])) for name in unused}
