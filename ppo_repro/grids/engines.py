"""What runs cells: the promise of every engine, and processes on this machine. Results come as cells end."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ppo_repro.grids.cell import LOG, Order, Result, finish_cell
from ppo_repro.grids.worker import ForkedCell, Worker

POLL_SECONDS = 0.02
END_SECONDS = 60.0  # how long an interrupted cell has to record that it was interrupted


class Engine(Protocol):
    """Runs cells somewhere. They may end in any order."""

    def check(self) -> None:
        """UserError where no cell could run; nothing has been written by then."""
        ...

    def run(self, orders: Sequence[Order]) -> Iterator[Result | None]:
        """Yield each result when its cell ends, and None in between so that the caller can show progress."""
        ...


@dataclass(frozen=True)
class _Live:
    """A cell that runs."""

    order: Order
    process: ForkedCell | subprocess.Popen[bytes]
    started: float

    def finish(self, code: int) -> Result:
        if isinstance(self.process, subprocess.Popen) and self.process.stdin is not None:
            self.process.stdin.close()
        return finish_cell(self.order, code, time.perf_counter() - self.started)


@dataclass(frozen=True)
class Processes:
    """Up to `workers` cells side by side on this machine."""

    workers: int

    def check(self) -> None:
        """There is nothing to be missing."""

    def run(self, orders: Sequence[Order]) -> Iterator[Result | None]:
        waiting, live, idle = deque(orders), list[_Live](), list[Worker]()
        try:
            while waiting or live:
                while waiting and len(live) < self.workers:
                    live.append(_start(waiting.popleft(), idle))
                for cell in list(live):
                    code = cell.process.poll()
                    if code is not None:
                        live.remove(cell)
                        if isinstance(cell.process, ForkedCell):
                            idle.append(cell.process.worker)
                        yield cell.finish(code)
                yield None
                time.sleep(POLL_SECONDS)
        finally:
            _end(live)
            for worker in idle:
                worker.close()


def _start(order: Order, idle: list[Worker]) -> _Live:
    """Start a cell, in an idle worker where it can be forked; that of other threads than it needs is ended."""
    started = time.perf_counter()
    worker = idle.pop() if idle else None
    if worker is not None and not worker.suits(order.threads):
        worker.close()
        worker = None
    if worker is None:
        worker = Worker(order.threads, Path(order.folder) / LOG)
    return _Live(order, ForkedCell(worker, order), started)


def _end(live: Sequence[_Live]) -> None:
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
        if isinstance(cell.process, ForkedCell):
            cell.process.worker.close()
        cell.finish(code)
