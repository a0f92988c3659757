"""Several processes (ranks) on one run, as torchrun starts them: how they divide sequences and exchange results.

If one process fails, torchrun's agent ends all processes of the run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, TypeVarTuple

import torch.distributed as dist
from torch import Tensor

from ppo_repro.base.errors import PromiseBroken, RankLost, UserError
from ppo_repro.base.output import one_line, say_anyway

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

# one process may score with an external judge or wait for servers as long as this while the others wait for it
PATIENCE = timedelta(days=1)

_joined_others = False  # whether this process has been one of several


@dataclass(frozen=True)
class Ranks:
    """This process among the `size` processes of a run, which all must call the same methods in the same order."""

    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        """Return whether this process is the one that records and prints."""
        return self.rank == 0

    def mine(self, count: int) -> range:
        """Return this rank's indices of `count` sequences.

        They are floor(rank count / size) to floor((rank + 1) count / size) - 1.
        """
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def everyone(self, value: T) -> list[T]:
        """Return one picklable value of each rank, in rank order. Raises RankLost if a rank is gone."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with _losing():
            dist.all_gather_object(values, value)
        return values

    def gather(self, values: Sequence[T]) -> list[T]:
        """Join the values of all ranks in rank order, and return them. Raises RankLost if a rank is gone."""
        return [value for of_rank in self.everyone(list(values)) for value in of_rank]

    def first(self, compute: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """Call `compute` on rank 0 alone, and return its result on every rank."""
        value: Any = compute(*arguments) if self.is_first else None
        return self.everyone(value)[0]

    def require_same(self, what: str, value: object) -> None:
        """Raise PromiseBroken, naming the rank, if `value` is not the same on every rank. `what` names the value."""
        values = self.everyone(value)
        other = next((rank for rank, theirs in enumerate(values) if theirs != values[0]), None)
        if other is not None:
            raise PromiseBroken(f"{what}: rank {other} has {values[other]}, rank 0 has {values[0]}")

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor, of any shape, by its sum over all ranks, which must agree in shapes and dtypes.

        Integer sums are exact. For floating point, gloo chooses the order of the sum, which decides its bits. Raises
        RankLost if a rank is gone.
        """
        if self.size == 1:
            return
        with _losing():
            for tensor in tensors:
                dist.all_reduce(tensor)

    def swap(self, ours: Tensor, theirs: Tensor, other: int) -> None:
        """Send a flat tensor to rank `other`, and receive one from it, whose length may be another.

        Raises RankLost if a rank is gone.
        """
        send, receive = ours.cpu(), theirs.cpu()  # gloo sends memory of the CPU
        exchange = [dist.P2POp(dist.isend, send, other)] if len(send) else []
        exchange += [dist.P2POp(dist.irecv, receive, other)] if len(receive) else []
        with _losing():
            for transfer in dist.batch_isend_irecv(exchange) if exchange else ():
                transfer.wait()
        if receive is not theirs:
            theirs.copy_(receive)

    def to_first(self, value: T) -> list[T]:
        """Return one picklable value of each rank on the first one, in rank order; elsewhere an empty list.

        Raises RankLost if a rank is gone.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size if self.is_first else []
        with _losing():
            dist.gather_object(value, values if self.is_first else None)
        return values


ALONE = Ranks(0, 1)


@contextmanager
def _losing() -> Iterator[None]:
    """Turn a failed exchange into RankLost."""
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:120]
        raise RankLost(f"another process of this run ended ({reason}); see its output") from error


@contextmanager
def joined(rank: int, size: int) -> Iterator[Ranks]:
    """Connect the processes of this run over gloo. Raises UserError if they cannot connect."""
    if size == 1:
        yield ALONE
        return
    global _joined_others
    _joined_others = True
    try:
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the {size} processes cannot connect ({reason}); start all of them with torchrun") from error
    try:
        yield Ranks(rank, size)
    except (UserError, PromiseBroken) as error:
        if rank:  # the first one says its own
            say_anyway(f"rank {rank}: {one_line(error)}")
        raise
    with _losing():
        dist.barrier()  # a process that has left can serve no exchange of the others
    dist.destroy_process_group()


def end_process(code: int) -> NoReturn:
    """Exit with `code`. If other processes joined, skip the interpreter's cleanup.

    gloo's threads may still hold tensors then, and abort the process when they release them
    (https://github.com/pytorch/pytorch/pull/179291).
    """
    if not _joined_others:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
