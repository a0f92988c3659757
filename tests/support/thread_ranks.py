"""Ranks that are threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any, TypeVar

from torch import Tensor

from ppo_repro.base.ranks import Ranks

T = TypeVar("T")


@dataclass(frozen=True)
class Thread(Ranks):
    """A rank that is a thread of this process, and exchanges in memory what ranks exchange over gloo."""

    board: list[Any]
    barrier: Barrier
    counts: list[int]

    def everyone(self, value: Any) -> list[Any]:
        self.board[self.rank] = value
        self.barrier.wait()
        values = list(self.board)
        self.barrier.wait()
        return values

    def to_first(self, value: Any) -> list[Any]:
        values = self.everyone(value)
        return values if self.is_first else []

    @property
    def sent(self) -> int:
        """The elements that this rank has sent."""
        return self.counts[self.rank]

    def swap(self, ours: Tensor, theirs: Tensor, other: int) -> None:
        self.counts[self.rank] += len(ours)
        theirs.copy_(self.everyone(ours.clone())[other])


def threads(count: int) -> list[Thread]:
    """The ranks 0 to `count` - 1; each must work in a thread of its own."""
    board, barrier, counts = [None] * count, Barrier(count, timeout=60), [0] * count
    return [Thread(rank, count, board, barrier, counts) for rank in range(count)]


def on_each(count: int, work: Callable[[Thread], T]) -> list[T]:
    """Let each of `count` ranks work in a thread, and return their results in rank order."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, threads(count)))
