"""What runs cells: the protocol of engines, and processes on this machine. Results come as cells end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Protocol

from ppo_repro.grids.cell import (
    LOG,
    Order,
    Result,
    cell_environment,
    command_of,
    finish_cell,
    forget_result,
    start_cell,
)
from ppo_repro.grids.cell_process import IMPORTED, forked
from ppo_repro.interrupts import held
from ppo_repro.runs.environment import code_digest

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


class ForkedCell:
    """A cell forked from a server that imported everything once; the methods have the names of `subprocess.Popen`."""

    stdin = None

    def __init__(self, order: Order) -> None:
        forget_result(order)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self._process = context.Process(target=forked, args=(Path(order.folder) / LOG, command_of(order)))
        resource_tracker.ensure_running()  # it would let signals through below
        before = dict(os.environ)
        os.environ.update(cell_environment(order.threads))  # the first cell starts the server
        try:
            with held():
                self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)

    def poll(self) -> int | None:
        """The exit code; None while the cell runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """The exit code; TimeoutExpired if the cell does not end."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("cell", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal to the cell's process."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)  # type: ignore[arg-type]

    def kill(self) -> None:
        """End the cell at once."""
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True)
class _Live:
    """A cell that runs."""

    order: Order
    process: ForkedCell | subprocess.Popen[bytes]
    started: float

    def finish(self, code: int) -> Result:
        if self.process.stdin is not None:
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
        threads, code = orders[0].threads, code_digest()
        try:
            while waiting or live:
                while waiting and len(live) < self.workers:
                    order = waiting.popleft()
                    # a cell records its code and threads; the server must have both
                    suits = order.threads == threads and code_digest() == code
                    started = time.perf_counter()
                    live.append(_Live(order, ForkedCell(order) if suits else start_cell(order), started))
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
