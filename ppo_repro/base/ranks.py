"""Several processes (ranks) on one run, as torchrun starts them: how they divide sequences and exchange results."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, TypeVarTuple

import torch.distributed as dist
from torch import Tensor

from ppo_repro.base import interrupts
from ppo_repro.base.errors import PromiseBroken, RankLost, Terminated, UserError, is_out_of_memory
from ppo_repro.base.output import SECONDS_TO_SPEAK, one_line, say_anyway
from ppo_repro.base.peers import GRACE, JOINING, SILENCE, connect

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
        _exchange(dist.all_gather_object, values, value)
        return values

    def gather(self, values: Sequence[T]) -> list[T]:
        """Join the values of all ranks in rank order, and return them. Raises RankLost if a rank is gone."""
        return [value for of_rank in self.everyone(list(values)) for value in of_rank]

    def first(self, compute: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """Call `compute` on rank 0 alone, and return its result on every rank."""
        value: Any = compute(*arguments) if self.is_first else None
        return self.everyone(value)[0]

    def require_same(self, what: str, value: object, kind: type[Exception] = PromiseBroken) -> None:
        """Raise an error, naming rank and host, if `value`, of the name `what`, is not the same on every rank."""
        values = self.everyone((value, socket.gethostname()))
        first, _ = values[0]
        for rank, (theirs, host) in enumerate(values):
            if theirs != first:
                raise kind(f"{what}: rank {rank} on {host} has {theirs}, rank 0 has {first}")

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor, of any shape, by its sum over all ranks, which must agree in shapes and dtypes.

        Integer sums are exact. For floating point, gloo chooses the order of the sum, which decides its bits. Raises
        RankLost if a rank is gone.
        """
        if self.size == 1:
            return
        for tensor in tensors:
            _exchange(dist.all_reduce, tensor)

    def swap(self, ours: Tensor, theirs: Tensor, other: int) -> None:
        """Send a flat tensor to rank `other`, and receive one from it, whose length may be another.

        Raises RankLost if a rank is gone.
        """
        send, receive = ours.cpu(), theirs.cpu()  # gloo sends memory of the CPU
        exchange = [dist.P2POp(dist.isend, send, other)] if len(send) else []
        exchange += [dist.P2POp(dist.irecv, receive, other)] if len(receive) else []

        def transfer() -> None:
            for begun in dist.batch_isend_irecv(exchange) if exchange else ():
                begun.wait()

        _exchange(transfer)
        if receive is not theirs:
            theirs.copy_(receive)

    def to_first(self, value: T) -> list[T]:
        """Return one picklable value of each rank on the first one, in rank order; elsewhere an empty list.

        Raises RankLost if a rank is gone.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size if self.is_first else []
        _exchange(dist.gather_object, value, values if self.is_first else None)
        return values


ALONE = Ranks(0, 1)


_thread = ThreadPoolExecutor(1, "exchange")


def _exchange(call: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
    """Return what an exchange over gloo returns. Raises RankLost if it fails.

    The exchange is in a thread, because no signal interrupts gloo.
    """
    try:
        return _thread.submit(call, *arguments).result()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        time.sleep(SILENCE + GRACE)  # a signal says which process is lost
        raise RankLost(f"another process of this run ended ({_short(error)}); see its output") from error


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


@contextmanager
def joined(rank: int, size: int) -> Iterator[Ranks]:
    """Connect the processes of this run over gloo, and end with them. Raises UserError if they cannot connect."""
    if size == 1:
        yield ALONE
        return
    global _joined_others
    _joined_others = True
    try:
        store = _store(rank, size)
        peers = connect(rank, size, store, os.environ["MASTER_ADDR"])
        _exchange(_init_group, store, rank, size)
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(f"the {size} processes cannot connect ({_short(error)}); start all with torchrun") from error
    try:
        yield Ranks(rank, size)
        _exchange(dist.barrier)  # a process that has left can serve no exchange of the others
    except (UserError, PromiseBroken) as error:
        interrupts.ending()  # what ends this process is its own error
        if rank:  # the first one may have the same to say, and more
            time.sleep(SECONDS_TO_SPEAK)
            say_anyway(f"rank {rank}: {one_line(error)}")
        peers.tell(one_line(error))
        raise
    except BaseException as error:
        is_signal = isinstance(error, KeyboardInterrupt)
        peers.tell("terminated" if isinstance(error, Terminated) else "interrupted" if is_signal else _short(error))
        raise
    peers.leave()
    dist.destroy_process_group()


def _store(rank: int, size: int) -> dist.Store:
    """Return torchrun's key-value store; without torchrun the first process has it."""
    host, port, waits = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=JOINING)
    has_it = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return dist.TCPStore(host, port, size, has_it, waits, wait_for_workers=False, multi_tenant=True)


def _init_group(store: dist.Store, rank: int, size: int) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)


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
