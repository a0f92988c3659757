"""What runs cells: the protocol of engines, and processes on this machine. Results come as cells end."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ppo_repro.grids.cell import Order, Result, finish_cell, start_cell

POLL_SECONDS = 0.02
END_SECONDS = 60.0  # how long an interrupted cell has to record that it was interrupted

Results = Generator[Result, None, None]


class Engine(Protocol):
    """Runs cells somewhere. They may end in any order."""

    def check(self) -> None:
        """UserError if no cell could run; nothing has been written by then."""
        ...

    def run(self, orders: Sequence[Order]) -> Results:
        """Yield each result when its cell ends; ends the cells when it is closed."""
        ...


@dataclass(frozen=True)
class Processes:
    """Up to `workers` cells side by side on this machine, each in a process of its own."""

    workers: int

    def check(self) -> None:
        """Nothing can be missing."""

    def run(self, orders: Sequence[Order]) -> Results:
        waiting, live = deque(orders), dict[Order, tuple[subprocess.Popen[bytes], float]]()
        try:
            while waiting or live:
                while waiting and len(live) < self.workers:
                    order = waiting.popleft()
                    live[order] = start_cell(order), time.perf_counter()
                for order, (process, started) in list(live.items()):
                    if process.poll() is not None:
                        del live[order]
                        yield finish_cell(order, process, started)
                time.sleep(POLL_SECONDS)
        finally:
            for process, _ in live.values():
                process.send_signal(signal.SIGINT)  # so that it can record that it was interrupted
            deadline = time.monotonic() + END_SECONDS
            for order, (process, started) in live.items():
                try:
                    process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                finish_cell(order, process, started)
