"""The processes of a run as a mesh: some hold one copy of the models together, and such groups divide the sequences.

Rank d T + t is process t of group d, for groups of T (`layout.mesh.tensor` or `pipeline`). Processes of one group
compute the same sequences and exchange among themselves in the middle of a model; everything else they exchange with
all.

An error in the middle of a layer is known to one process only, and the others of its group wait for it there, not
where errors are exchanged. So it is written into the store too, and who waits for more than a second looks there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from ppo_repro.collectives import all_gather, all_reduce
from ppo_repro.heartbeats import NOTICE_SECONDS
from ppo_repro.mesh.shards import ShardRanks
from ppo_repro.ranks import ALONE, Ranks, lost
from ppo_repro.shares import share_ranges

if TYPE_CHECKING:  # models need this module, and not pydantic
    from ppo_repro.config.layout import MeshConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """This process among some of those of a run. All of them call the same methods in the same order."""

    rank: int
    size: int
    world: Ranks
    handle: dist.ProcessGroup

    def gather(self, values: Sequence[T]) -> list[T]:
        """The values of all processes of the group, in their order. Tensors in them must be on the CPU."""
        try:
            gathered = all_gather(list(values), self.size, self._waiting, self.handle)
        except RuntimeError as error:
            raise lost(error) from error
        return [value for of_rank in gathered for value in of_rank]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor of integers by its sum over the group; shapes and dtypes are the same everywhere."""
        try:
            all_reduce(tensors, self._waiting, self.handle)
        except RuntimeError as error:
            raise lost(error) from error

    def _waiting(self, seconds: float) -> None:
        self.world.hear_of_failure()
        self.world.waited(seconds)


@dataclass(frozen=True)
class MeshRanks(Ranks):
    """All processes of a run, in groups that hold one copy of the models each.

    Every process of a group computes what the others do: of the stages' results those of its first process count.
    """

    group: Group | Ranks = ALONE  # that of this process
    data: Group | Ranks = ALONE  # the processes at the same place of the other groups
    by_layers: bool = False  # whether a group divides the layers of a model, and not each of them

    def mine(self, count: int, shares: Sequence[int]) -> range:
        """The share of this process's group of `count` sequences; equal shares where `shares` is empty."""
        return share_ranges(count, shares or [1] * self.data.size)[self.data.rank]

    def gather(self, values: Sequence[T]) -> list[T]:
        """The values of all groups, in their order."""
        return super().gather(values if self.group.rank == 0 else [])

    def everyone(self, value: T) -> list[T]:
        return super().gather([value])

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the processes that hold the same part of the models."""
        self.data.add_up(tensors)

    @property
    def holders(self) -> Group | Ranks:
        return self.group

    @property
    def divides_weights(self) -> bool:
        return self.group.size > 1


def as_mesh(ranks: Ranks, mesh: MeshConfig) -> Ranks:
    """All processes of a run in the groups of a mesh, whose size divides their number; all of them must call this.

    With `zero` 3, which has no groups, they hold the weights in pieces.
    """
    inherited: dict[str, Any] = {field.name: getattr(ranks, field.name) for field in fields(Ranks)}
    if mesh.zero == 3 and ranks.size > 1:
        return ShardRanks(**inherited)
    if mesh.group == 1:
        return ranks
    everyone = range(ranks.size)
    by_copy = [[r for r in everyone if r // mesh.group == d] for d in range(ranks.size // mesh.group)]
    by_part = [[r for r in everyone if r % mesh.group == t] for t in range(mesh.group)]
    own, same = (_group(ranks, groups) for groups in (by_copy, by_part))
    return MeshRanks(**inherited, group=own, data=same, by_layers=mesh.pipeline > 1)


def _group(ranks: Ranks, groups: Sequence[list[int]]) -> Group | Ranks:
    """The one of some groups that this process is in; each process makes all of them, as torch wants it."""
    if all(len(members) == 1 for members in groups):
        return ALONE
    timeout = timedelta(seconds=ranks.patience + 10 * NOTICE_SECONDS)  # as that of all processes
    handles = [dist.new_group(members, timeout=timeout) for members in groups]
    place = next(i for i, members in enumerate(groups) if ranks.rank in members)
    handle, members = handles[place], groups[place]
    assert handle is not None
    return Group(members.index(ranks.rank), len(members), ranks, handle)
