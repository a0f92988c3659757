"""What runs cells: the protocol of engines, and processes on this machine. Results come as cells end."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ppo_repro.grids.cell import Order, Result, finish_cell, start_cell

POLL_SECONDS = 0.02
END_SECONDS = 60.0  # how long an interrupted cell has to record that it was interrupted


class Engine(Protocol):
    """Runs cells somewhere. They may end in any order."""

    def check(self) -> None:
        """UserError if no cell could run; nothing has been written by then."""
        ...

    def run(self, orders: Sequence[Order]) -> Iterator[Result | None]:
        """Yield each result when its cell ends, and None in between so that the caller can show progress."""
        ...


@dataclass(frozen=True)
class _Live:
    """A cell that runs."""

    order: Order
    process: subprocess.Popen[bytes]
    started: float

    def finish(self, code: int) -> Result:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return finish_cell(self.order, code, time.perf_counter() - self.started)


@dataclass(frozen=True)
class Processes:
    """Up to `workers` cells side by side on this machine, each in a process of its own."""

    workers: int

    def check(self) -> None:
        """Nothing can be missing."""

    def run(self, orders: Sequence[Order]) -> Iterator[Result | None]:
        waiting, live = deque(orders), list[_Live]()
        try:
            while waiting or live:
                while waiting and len(live) < self.workers:
                    order = waiting.popleft()
                    live.append(_Live(order, start_cell(order), time.perf_counter()))
                for cell in list(live):
                    ended = cell.process.poll()
                    if ended is not None:
                        live.remove(cell)
                        yield cell.finish(ended)
                yield None
                time.sleep(POLL_SECONDS)
        finally:
            _interrupt(live)


def _interrupt(live: Sequence[_Live]) -> None:
    """Interrupt every cell so that it can record that, then make sure that its process is gone."""
    for cell in live:
        cell.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + END_SECONDS
    for cell in live:
        try:
            code = cell.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            cell.process.kill()
            code = cell.process.wait(END_SECONDS)
        cell.finish(code)
