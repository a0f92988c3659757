"""Progress of a grid: a live table on a terminal, one line per ended cell elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from ppo_repro.errors import UserError
from ppo_repro.grids.cell import Order, Result, run_of
from ppo_repro.output import say_anyway
from ppo_repro.records import manifest

LOOK_SECONDS = 1.0
ROWS = 20  # a table longer than the terminal cannot be updated in place


class GridWatcher(Protocol):
    """Is told what happens to the cells."""

    def begin(self, orders: Sequence[Order], cells: int) -> None:
        """`orders` are about to run, out of `cells` in the grid."""
        ...

    def look(self) -> None:
        """Called again and again while cells run."""
        ...

    def ended(self, result: Result) -> None:
        """A cell has ended."""
        ...


class ConsoleGrid(AbstractContextManager["ConsoleGrid"]):
    """Shows the cells that are running, their recorded iterations, and how many cells are left."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._orders: dict[str, Order] = {}

        self._cells, self._ended, self._looked, self._started = 0, 0, 0.0, time.perf_counter()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def begin(self, orders: Sequence[Order], cells: int) -> None:
        self._orders = {order.name: order for order in orders}
        self._cells, self._ended = cells, cells - len(orders)
        if not self._console.is_terminal:
            say_anyway(f"{self._ended} of {cells} cells are complete already")

    def look(self) -> None:
        if self._console.is_terminal and time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            self._live.update(self._table(), refresh=True)

    def ended(self, result: Result) -> None:
        self._orders.pop(result.name, None)
        self._ended += 1
        outcome = "done" if result.exit_code == 0 else f"ended with {result.exit_code}: {result.message}"
        line = f"{self._ended}/{self._cells} {result.name}: {outcome} ({result.seconds:.1f} s)"
        if self._console.is_terminal:
            self._live.console.print(line, highlight=False, markup=False)
        else:
            say_anyway(line)

    def _table(self) -> Table:
        seconds = time.perf_counter() - self._started
        table = Table(title=f"{self._ended} of {self._cells} cells ended, {seconds:.0f} s", title_justify="left")
        for name in ("cell", "state", "iterations"):
            table.add_column(name)
        shown = [(name, *_progress(Path(order.folder))) for name, order in self._orders.items()]
        shown.sort(key=lambda row: row[1] != "running")
        for row in shown[:ROWS]:
            table.add_row(*row)
        return table


def _progress(folder: Path) -> tuple[str, str]:
    try:
        run_dir = run_of(folder)
        head = None if run_dir is None else manifest.load_head(run_dir)
    except UserError:  # the run is just being removed
        head = None
    return ("waiting", "") if head is None else (head.status, str(head.num_iterations))
