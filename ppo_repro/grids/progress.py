"""Progress of a grid: one line per ended cell, and on a terminal the running cells in a line that is rewritten."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status

from ppo_repro.errors import UserError
from ppo_repro.grids.cell import Order, Result, run_of
from ppo_repro.output import say_anyway
from ppo_repro.records import manifest

LOOK_SECONDS = 1.0


class ConsoleGrid(AbstractContextManager["ConsoleGrid"]):
    """Says which cells have ended, which are running, and how many are left."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._status = Status("", console=console) if console.is_terminal else None
        self._orders: dict[str, Order] = {}
        self._cells, self._ended, self._looked = 0, 0, 0.0

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def begin(self, orders: Sequence[Order], cells: int) -> None:
        """`orders` are about to run, out of `cells` in the grid."""
        self._orders = {order.name: order for order in orders}
        self._cells, self._ended = cells, cells - len(orders)
        self._say(f"{self._ended} of {cells} cells are complete already")

    def look(self) -> None:
        """Called again and again while cells run."""
        if self._status is not None and time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            running = [text for order in self._orders.values() if (text := _progress(order))]
            self._status.update(f"{self._ended} of {self._cells} cells ended; running: {'; '.join(running) or 'none'}")

    def ended(self, result: Result) -> None:
        """A cell has ended."""
        self._orders.pop(result.name, None)
        self._ended += 1
        outcome = "done" if result.exit_code == 0 else f"ended with {result.exit_code}: {result.message}"
        self._say(f"{self._ended}/{self._cells} {result.name}: {outcome} ({result.seconds:.1f} s)")

    def _say(self, line: str) -> None:
        if self._status is not None:
            self._status.console.print(line, highlight=False, markup=False)
        else:
            say_anyway(line)


def _progress(order: Order) -> str:
    """Name and recorded iterations of a running cell; empty if it is not running."""
    try:
        run_dir = run_of(Path(order.folder))
        head = None if run_dir is None else manifest.load_head(run_dir)
    except UserError:  # the run is just being removed
        return ""
    return f"{order.name}, {head.num_iterations} iterations" if head is not None and head.status == "running" else ""
