"""Ranks that are threads of one process: what several processes compute, without their start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ppo_repro.ranks import Ranks

T = TypeVar("T")
TIMEOUT = 60.0  # seconds for the other threads of one exchange


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    """One of several threads, which exchange through a list."""

    shared: list[Any] = field(default_factory=list)
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))

    def everyone(self, value: T) -> list[T]:
        self.shared[self.rank] = value
        self.barrier.wait()
        everything = list(self.shared)
        self.barrier.wait()
        return [_copied(of_rank) for of_rank in everything]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        everything = self.everyone([t.clone() for t in tensors])
        for i, tensor in enumerate(tensors):
            tensor.copy_(torch.stack([own[i] for own in everything]).sum(0))

    def exchange_sum(self, tensor: Tensor) -> None:
        sums = self.everyone(tensor.clone())
        while len(sums) > 1:
            sums = [first + second for first, second in zip(sums[::2], sums[1::2], strict=True)]
        tensor.copy_(sums[0])


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
