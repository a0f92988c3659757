"""What a person sees while a run works; everything goes to stderr."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ppo_repro.output import say_anyway
from ppo_repro.watcher import Watcher


class ConsoleProgress(Watcher, AbstractContextManager["ConsoleProgress"]):
    """Progress bars; where stderr is no terminal, a line after the first iteration and every tenth of the work."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def _show(self, name: str, done: int, total: int, note: str) -> None:
        is_new = name not in self._tasks
        if is_new:
            self._tasks[name] = self._bars.add_task(name, total=total, note="")
        self._bars.update(self._tasks[name], completed=done, total=total, note=note)
        if not self._console.is_terminal and (is_new or done * 10 // total != (done - 1) * 10 // total):
            say_anyway(f"{name} {done}/{total}: {note}")

    def warm_start(self, step: int, total: int, loss: float) -> None:
        self._show("warm start", step, total, f"loss {loss:.3f} nats/token")

    def iteration(self, done: int, total: int, figures: str) -> None:
        self._show("iteration", done, total, figures)

    def servers(self, waited: int, limit: int) -> None:
        self._show("SGLang", waited, limit, "seconds of the longest wait for a server to start")

    def preferences(self, what: str, step: int, total: int, loss: float) -> None:
        self._show(what, step, total, f"loss {loss:.3f} nats/pair")

    def check(self, what: str, done: int, total: int) -> None:
        """One check of a probe is done."""
        self._show("checks", done, total, what)

    def warning(self, text: str) -> None:
        self._console.print(f"warning: {text}", markup=False, highlight=False, soft_wrap=True)
