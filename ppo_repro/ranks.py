"""Several processes (ranks) on one run: which sequences belong to which rank, and the exchanges between them.

Every exchange also carries a rank's error or Ctrl-C since the last one. It is raised on all ranks at their next
exchange, so that no rank waits for one that has left. Of one that is killed, stopped or cut off the others hear by
`heartbeats`, and end with RankLost. A single process exchanges nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event
from types import FrameType
from typing import Any, NoReturn, TypeVar, TypeVarTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from ppo_repro import interrupts
from ppo_repro.collectives import all_gather, all_reduce, all_to_all, wait
from ppo_repro.errors import (
    Failure,
    RankLost,
    SharedPromiseBroken,
    SharedUserError,
    Terminated,
    UserError,
    failure_of,
    known_to_all,
    shared,
    unshared,
)
from ppo_repro.heartbeats import NOTICE_SECONDS, PATIENCE_SECONDS, Heartbeats
from ppo_repro.numerics.arithmetic.divided import Holders
from ppo_repro.shares import share_ranges

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

_joined_others = False  # whether this process has been one of several


@dataclass(frozen=True)
class _Message:
    what: str  # name of the exchange; where ranks differ, they are at different points
    value: Any
    failure: Failure | None


@dataclass(frozen=True)
class Ranks:
    """This process among `size` processes. All of them must call the same methods in the same order."""

    rank: int
    size: int
    interrupted: Event = field(default_factory=Event, repr=False, compare=False)
    beats: Heartbeats | None = field(default=None, repr=False, compare=False)
    patience: float = PATIENCE_SECONDS  # longest wait for one exchange, seconds

    def __deepcopy__(self, memo: dict[int, object]) -> Ranks:
        """These processes themselves, of which a copied model has no others."""
        return self

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that records and prints."""
        return self.rank == 0

    def mine(self, count: int, shares: Sequence[int]) -> range:
        """This rank's share of `count` sequences; equal shares where `shares` is empty."""
        return share_ranges(count, shares or [1] * self.size)[self.rank]

    def gather(self, values: Sequence[T]) -> list[T]:
        """The values of all ranks, in rank order. Tensors in them must be on the CPU."""
        return [value for rank_values in self._exchange("gather", list(values)) for value in rank_values]

    def everyone(self, value: T) -> list[T]:
        """One value of each process, in rank order."""
        return self.gather([value])

    @property
    def holders(self) -> Holders:
        """The processes that hold one copy of the models together; this one alone if it has all of them."""
        return ALONE

    @property
    def divides_weights(self) -> bool:
        """Whether no process has all weights."""
        return False

    def first(self, compute: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """The result of `compute` on rank 0, on every rank; the others do not call it."""
        value: T = self._exchange("first", compute(*arguments) if self.is_first else None)[0]
        return value

    def check(self) -> None:
        """Raise here the error or Ctrl-C of any rank."""
        self._exchange("check", None)

    def require_same(self, what: str, value: object) -> None:
        """Raise PromiseBroken, naming the rank, where `value` is not the same on every rank."""
        values = self._exchange(what, value)
        other = next((rank for rank, theirs in enumerate(values) if theirs != values[0]), None)
        if other is not None:
            raise SharedPromiseBroken(f"{what}: rank {other} has {values[other]}, rank 0 has {values[0]}")

    def require_agreed(self, field: str, value: object) -> None:
        """Raise UserError, naming the rank, where a `field` of the configuration is not the same on every rank."""
        values = self.gather([value])
        other = next((rank for rank, theirs in enumerate(values) if theirs != values[0]), None)
        if other is not None:
            raise SharedUserError(
                f"{field}: rank {other} has {values[other]}, rank 0 has {values[0]}; give every process the same"
            )

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks; shapes and dtypes must be the same on every rank.

        Exact for integers. For floating point the communication backend chooses the order, and with it the bits.
        """
        if self.size == 1:
            return
        self.require_same("shapes of the tensors to sum", [(tuple(t.shape), str(t.dtype)) for t in tensors])
        try:
            all_reduce(tensors, self.waited)
        except RuntimeError as error:
            raise lost(error) from error

    def deal(self, parts: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """The bytes that every rank has for this one, in rank order; `parts[r]` is for rank r, uint8.

        `lengths`: how many come from each rank. Nothing is checked: all ranks have agreed on what they exchange.
        """
        if self.beats is not None:
            self.beats.exchanges += 1
        try:
            return all_to_all(parts, lengths, self.waited)
        except RuntimeError as error:
            raise lost(error) from error

    def _exchange(self, what: str, value: Any, failure: Failure | None = None) -> list[Any]:
        """Every rank's value, in rank order. Raises the failure of the lowest rank that has one, unless it is ours."""
        if self.size == 1:
            return [value]
        if self.beats is not None:
            self.beats.exchanges += 1
        own_failure = Failure("interrupt", "") if failure is None and self.interrupted.is_set() else failure
        try:
            messages: list[_Message] = all_gather(_Message(what, value, own_failure), self.size, self.waited)
        except RuntimeError as error:
            raise lost(error) from error
        for rank, message in enumerate(messages):
            if message.failure is not None:
                if rank == self.rank and failure is not None:
                    return []
                raise shared(rank, message.failure)
        stray = next((rank for rank, message in enumerate(messages) if message.what != messages[0].what), None)
        if stray is not None:
            raise SharedPromiseBroken(f"rank {stray} is at {messages[stray].what!r}, rank 0 at {messages[0].what!r}")
        return [message.value for message in messages]

    def waited(self, seconds: float) -> None:
        """Called once per look while an exchange waits; RankLost where it has waited too long."""
        if self.beats is not None:
            self.beats.waited(seconds, self.patience)

    def hear_of_failure(self) -> None:
        """Raise the error that a process told of before it could be exchanged; the others hear of it from here too."""
        told = None if self.beats is None else self.beats.failure()
        if told is not None:
            raise unshared(*told)


ALONE = Ranks(0, 1)


def lost(error: RuntimeError) -> RankLost:
    """What a failed exchange means: a process on the other side is gone."""
    reason = " ".join(str(error).split())[:120]
    return RankLost(f"another process of this run ended unexpectedly ({reason}); see its output")


def _out_of_step(error: BaseException) -> bool:
    """Whether no exchange is possible any more: a rank is gone, or there was a second Ctrl-C."""
    return isinstance(error, RankLost | KeyboardInterrupt) and not known_to_all(error)


@contextmanager
def _telling(ranks: Ranks) -> Iterator[None]:
    """An error that leaves this block on one rank is raised on all."""
    try:
        yield
        ranks._exchange("end", None)
    except BaseException as error:
        if not known_to_all(error) and not _out_of_step(error):
            if ranks.beats is not None:
                ranks.beats.tell(failure_of(error))
            ranks._exchange("end", None, failure_of(error))
        raise


@contextmanager
def joined(rank: int, size: int, patience: float = PATIENCE_SECONDS) -> Iterator[Ranks]:
    """Connect the processes of this run until all of them are done or have failed.

    CPU tensors travel over gloo, CUDA tensors over NCCL. If a rank fails, all ranks leave this block with the error
    of the lowest rank that has one. Ctrl-C is raised at the next exchange, a second one at once. UserError where the
    processes cannot connect; RankLost where one does not answer, or not within `patience` seconds.
    """
    if size == 1:
        yield ALONE
        return
    global _joined_others
    _joined_others = True
    beats = _connect(rank, size, patience)
    ranks = Ranks(rank, size, Event(), beats, patience)

    def interrupt(number: int, frame: object) -> None:
        ranks.interrupted.set()
        signal.signal(signal.SIGINT, previous)

    def lose(number: int, frame: FrameType | None) -> None:
        if not interrupts.would_lose_it(frame):  # the thread sends it again
            for further in (signal.SIGUSR1, signal.SIGTERM):
                signal.signal(further, signal.SIG_IGN)
            raise RankLost(beats.lost)

    previous = signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGUSR1, lose)
    try:
        try:
            with _telling(ranks):
                yield ranks
        except BaseException as error:
            if not _out_of_step(error):
                _leave(ranks)
            elif isinstance(error, RankLost | Terminated):
                _explain(beats, error)
            raise
        else:
            _leave(ranks)
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        beats.leave()
        signal.signal(signal.SIGINT, previous)


def _connect(rank: int, size: int, patience: float) -> Heartbeats:
    try:
        store, _, _ = next(rendezvous("env://", rank, size))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        # longer than our own patience, so that it is never the one to end
        timeout = timedelta(seconds=patience + 10 * NOTICE_SECONDS)
        dist.init_process_group(
            backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=timeout
        )
        return Heartbeats(dist.PrefixStore("heartbeats", store.clone()), rank, size)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the {size} processes cannot connect ({reason}); start all of them with torchrun") from error


def _explain(beats: Heartbeats, error: BaseException) -> None:
    """Raise RankLost naming who was lost. torchrun sends SIGTERM to all processes as soon as one is dead."""
    for further in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(further, signal.SIG_IGN)
    lost = beats.dead(is_certain=isinstance(error, RankLost))
    if lost:
        raise RankLost(lost) from error


def _leave(ranks: Ranks) -> None:
    """Wait for every rank, because torchrun ends the others as soon as one has ended with an error.

    The work is done by now, so torchrun's SIGTERM is ignored: the process only has to report and exit.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(RuntimeError, RankLost):
        wait(dist.barrier(async_op=True), ranks.waited)
        dist.destroy_process_group()


def end_process(code: int) -> NoReturn:
    """Exit with `code`; without the interpreter's cleanup where this process was one of several.

    gloo's threads may still hold tensors then, and abort the process when they release them
    (https://github.com/pytorch/pytorch/pull/179291).
    """
    if not _joined_others:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
