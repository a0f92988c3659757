"""Ranks that are threads of one process: what several processes compute, without their start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ppo_repro.errors import Failure
from ppo_repro.mesh.groups import MeshRanks
from ppo_repro.mesh.shards import ShardRanks
from ppo_repro.ranks import Ranks

T = TypeVar("T")
TIMEOUT = 60.0  # seconds for the other threads of one exchange


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    """One of several threads, which exchange through a list."""

    shared: list[Any] = field(default_factory=list)
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    sent: list[int] = field(default_factory=list)  # bytes of each `deal`

    def _exchange(self, what: str, value: Any, failure: Failure | None = None) -> list[Any]:
        self.shared[self.rank] = what, value
        self.barrier.wait()
        everything = list(self.shared)
        self.barrier.wait()
        assert len({of_rank[0] for of_rank in everything}) == 1, "threads are at different points"
        return [_copied(of_rank[1]) for of_rank in everything]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        everything = self._exchange("add_up", [t.clone() for t in tensors])
        assert len({tuple((t.shape, t.dtype) for t in own) for own in everything}) == 1
        for i, tensor in enumerate(tensors):
            tensor.copy_(torch.stack([own[i] for own in everything]).sum(0))

    def deal(self, parts: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        self.sent.append(sum(len(part) for other, part in enumerate(parts) if other != self.rank))
        received = [of_rank[self.rank] for of_rank in ThreadRanks._exchange(self, "deal", list(parts))]
        assert [len(part) for part in received] == list(lengths)
        return received


@dataclass(frozen=True)
class ThreadShards(ShardRanks, ThreadRanks):
    """One of several threads that hold weights in pieces."""


def thread_shards(ranks: ThreadRanks) -> ThreadShards:
    """The same threads, as `mesh.groups.as_mesh` makes processes that divide weights."""
    return ThreadShards(ranks.rank, ranks.size, shared=ranks.shared, barrier=ranks.barrier, sent=ranks.sent)


def _copied(value: Any) -> Any:
    """The tensors of a list in memory of their own, as another process gets them."""
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value.clone() if isinstance(value, Tensor) else value


def in_threads(size: int, work: Callable[[ThreadRanks], T]) -> list[T]:
    """What `work` returns on each of `size` ranks; an error of one of them is raised."""
    shared: list[Any] = [None] * size
    barrier, results, errors = threading.Barrier(size, timeout=TIMEOUT), dict[int, T](), list[BaseException]()

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, size, shared=shared, barrier=barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)] or errors
    if first:
        raise first[0]
    return [results[rank] for rank in range(size)]


@dataclass(frozen=True)
class ThreadMesh(MeshRanks):
    """One of several threads that are a mesh; `world` are all of them."""

    world: ThreadRanks = field(default_factory=lambda: ThreadRanks(0, 1))

    def _exchange(self, what: str, value: Any, failure: Failure | None = None) -> list[Any]:
        return self.world.gather([value])


def thread_mesh(world: ThreadRanks, size: int, by_layers: bool = False) -> ThreadMesh:
    """Threads in groups of `size`, as `mesh.groups.as_mesh` makes them of processes."""
    if world.rank == 0:
        shape = {"group": (world.size // size, size), "data": (size, world.size // size)}
        made = {
            name: [([None] * members, threading.Barrier(members, timeout=TIMEOUT)) for _ in range(count)]
            for name, (count, members) in shape.items()
        }
        groups = world.gather([made])[0]
    else:
        groups = world.gather([{}])[0]
    d, t = divmod(world.rank, size)
    own, same = groups["group"][d], groups["data"][t]
    return ThreadMesh(
        world.rank,
        world.size,
        group=ThreadRanks(t, size, shared=own[0], barrier=own[1]),
        data=ThreadRanks(d, world.size // size, shared=same[0], barrier=same[1]),
        by_layers=by_layers,
        world=world,
    )
