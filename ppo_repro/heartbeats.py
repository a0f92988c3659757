"""Who of the processes of a run still lives: each one writes a beat into the store that torchrun keeps for them.

A thread writes the beats, so a process that computes for an hour is alive, and one that is stopped, dead or cut off is
not: a stopped process stops its threads too. Beats are counted in one's own beats, not in seconds, so that a machine
that slept, or a whole run that was stopped and continued, loses nobody.

A process whose main thread hangs keeps beating. Nothing tells it from one that works long, so the others name it,
and give up after `PATIENCE_SECONDS`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed import Store

from ppo_repro.errors import Failure, RankLost
from ppo_repro.output import say_anyway

BEAT_SECONDS = 1.5
MISSED_BEATS = 20  # half a minute
NOTICE_SECONDS = 30.0
NOTICE_AGAIN_SECONDS = 600.0
EXIT_CODE = 3  # of RankLost
PATIENCE_NAME = "PPO_REPRO_RANK_TIMEOUT"
PATIENCE_SECONDS = 1800
_LOST = "lost"  # key of who was lost, by whoever noticed first
_FAILED = "failed"  # key of the first error that a process told of


@dataclass(frozen=True)
class Beat:
    """What a process says of itself."""

    count: int
    exchanges: int  # begun so far
    has_left: bool = False

    def text(self) -> str:
        return f"{self.count} {self.exchanges} {int(self.has_left)}"

    @classmethod
    def parse(cls, text: bytes) -> Beat:
        count, exchanges, has_left = map(int, text.split())
        return cls(count, exchanges, bool(has_left))


@dataclass
class Heartbeats:
    """This process's beats, and what it knows of the others'."""

    store: Store
    rank: int
    size: int
    names: list[str] = field(init=False)  # "rank 1 (pid 123 on host)"
    exchanges: int = 0
    ticks: int = 0  # of the thread
    lost: str = ""
    _told: int = 0
    _beats: list[Beat] = field(init=False)
    _unchanged: list[int] = field(init=False)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.store.set(self._key(self.rank), Beat(0, 0).text())
        self.store.set(f"who {self.rank}", f"{os.getpid()} {socket.gethostname()}")
        self._who = [self.store.get(f"who {rank}").decode().split(" ", 1) for rank in range(self.size)]
        self.names = [f"rank {rank} (pid {pid} on {host})" for rank, (pid, host) in enumerate(self._who)]
        self._beats, self._unchanged = [Beat(0, 0)] * self.size, [0] * self.size
        self._thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        self._thread.start()

    @staticmethod
    def _key(rank: int) -> str:
        return f"beat {rank}"

    def leave(self) -> None:
        """Say that this process ends by itself, and beat no more."""
        self._stop.set()
        self._thread.join(2 * BEAT_SECONDS)  # it may be waiting for a store that does not answer
        if not self._thread.is_alive():
            self._write(has_left=True)

    def _write(self, has_left: bool = False) -> None:
        with suppress(RuntimeError):  # where the store is gone, `_look` notices
            self.store.set(self._key(self.rank), Beat(self.ticks, self.exchanges, has_left).text())

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            self.ticks += 1
            self._write()
            self._look()
            if self.lost:
                self._told += 1
                os.kill(os.getpid(), signal.SIGUSR1)  # the main thread may be computing, or waiting
            if self._told > MISSED_BEATS:  # it does not come back to Python; records are whole at every instant
                say_anyway(f"stopped: {self.lost}; complete iterations are kept")
                os._exit(EXIT_CODE)

    def _look(self) -> None:
        """Count how many of our own beats each other process has missed."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:
            texts = self.store.multi_get([self._key(rank) for rank in others])
            if self.store.check([_LOST]):
                self.lost = self.store.get(_LOST).decode()
                return
        except RuntimeError:
            # rank 0 keeps the store where no torchrun does
            self._unchanged[0] += 1
            if self._unchanged[0] >= MISSED_BEATS:
                self.lost = f"{self.names[0]}, which keeps the store of this run, does not answer"
            return
        for rank, text in zip(others, texts, strict=True):
            beat = Beat.parse(text)
            self._unchanged[rank] = 0 if beat != self._beats[rank] or beat.has_left else self._unchanged[rank] + 1
            self._beats[rank] = beat
            if self._unchanged[rank] >= MISSED_BEATS:
                seconds = MISSED_BEATS * BEAT_SECONDS
                self._note(f"{self.names[rank]} has given no sign of life for {seconds:.0f} s")

    def _note(self, lost: str) -> None:
        """Keep the first reason that any process found; all of them say the same."""
        with suppress(RuntimeError):
            lost = self.store.compare_set(_LOST, "", lost).decode() or lost
        self.lost = lost

    def tell(self, failure: Failure) -> None:
        """Write down the error of this process, unless another did; for those that wait where none is exchanged."""
        with suppress(RuntimeError):
            self.store.compare_set(_FAILED, "", json.dumps([self.rank, failure.kind, failure.message]))

    def failure(self) -> tuple[int, Failure] | None:
        """The rank and the error that a process told of, if any did."""
        try:
            if not self.store.check([_FAILED]):
                return None
            rank, kind, message = json.loads(self.store.get(_FAILED))
        except RuntimeError:  # `_look` notices
            return None
        return rank, Failure(kind, message)

    def dead(self, is_certain: bool) -> str:
        """The process that is gone without having said so, as far as this one can know; empty if there is none.

        `is_certain`: somebody is gone, so that a process of another machine is worth waiting for.
        """
        self._look()
        for _ in range(MISSED_BEATS + 2):
            for rank, (pid, host) in enumerate(self._who):
                is_here = host == self._who[self.rank][1]
                if not self.lost and is_here and not self._beats[rank].has_left and _is_gone(int(pid)):
                    self._note(f"{self.names[rank]} has ended without a word; see its output")
            if self.lost or not is_certain or any(beat.has_left for beat in self._beats):
                break
            self._stop.wait(BEAT_SECONDS)
        return self.lost

    def behind(self) -> list[str]:
        """The processes that have not begun the exchange that this one waits in."""
        return [self.names[rank] for rank, beat in enumerate(self._beats) if self._is_behind(rank, beat)]

    def _is_behind(self, rank: int, beat: Beat) -> bool:
        return rank != self.rank and beat.exchanges < self.exchanges

    def speaks(self) -> bool:
        """Whether this is the lowest rank among those that wait."""
        return all(self._is_behind(rank, beat) for rank, beat in enumerate(self._beats[: self.rank]))

    def waited(self, seconds: float, patience: float) -> None:
        """Say for whom this process waits; RankLost when that is too long."""
        if seconds >= patience:
            self._note(f"{' and '.join(self.behind()) or 'another process'} did not come within {patience:.0f} s")
            raise RankLost(self.lost)
        is_due = seconds == NOTICE_SECONDS or seconds % NOTICE_AGAIN_SECONDS == 0
        if is_due and self.speaks():
            say_anyway(
                f"waiting for {' and '.join(self.behind()) or 'an exchange'} for {seconds:.0f} s; "
                f"the run ends after {patience:.0f} s ({PATIENCE_NAME})"
            )


def _is_gone(pid: int) -> bool:
    """Whether no process of this machine has this id, or only the remains of one."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except ProcessLookupError:
        return True
    except OSError:
        return False
