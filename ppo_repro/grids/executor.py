"""The interface of the executors, which run cells, and the executor that runs them as processes of this machine."""

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
END_SECONDS = 60.0  # for an interrupted cell to record that it was interrupted

Results = Generator[Result, None, None]


class Executor(Protocol):
    """Interface of the executors, which run cells in any order."""

    def check(self) -> None:
        """Raise UserError if no cell could run. Nothing has been written by then."""
        ...

    def run(self, orders: Sequence[Order]) -> Results:
        """Yield each result when its cell ends. Closing the generator ends the cells that still run."""
        ...


@dataclass(frozen=True)
class Processes:
    """Executor that runs up to `workers` cells at once on this machine, each in its own process."""

    workers: int

    def check(self) -> None:
        """Raise UserError if no cell could run. Nothing has been written by then."""

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
                process.send_signal(signal.SIGINT)  # the cell records that it was interrupted
            deadline = time.monotonic() + END_SECONDS
            for order, (process, started) in live.items():
                try:
                    process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                finish_cell(order, process, started)
