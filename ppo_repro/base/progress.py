"""Progress of a run for a person, on stderr."""

from __future__ import annotations

from collections import deque

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

from ppo_repro.base.clock import duration, now
from ppo_repro.base.output import printable, say_anyway
from ppo_repro.base.watcher import Watcher

RECENT = 10  # iterations from which comes how long the others may take: responses grow shorter or longer


class ConsoleProgress(Progress, Watcher):
    """Progress bars; if stderr is no terminal, one line after the first iteration and after each tenth of the work."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        super().__init__(
            TextColumn("{task.description:<12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._bars: dict[str, TaskID] = {}
        self._ends: deque[float] = deque(maxlen=RECENT + 1)  # moments at which the newest iterations ended

    def step(self, name: str, done: int, total: int, figures: str) -> None:
        is_new = name not in self._bars
        if is_new:
            self._bars[name] = self.add_task(name, total=total, note="")
        self.update(self._bars[name], completed=done, total=total, note=printable(figures))
        if not self.console.is_terminal and (is_new or done * 10 // total != (done - 1) * 10 // total):
            say_anyway(f"{name} {done}/{total}: {figures}")

    def iteration(self, done: int, total: int, figures: str, seconds: float) -> None:
        if not self._ends:
            self._ends.append(now() - seconds)
        self._ends.append(now())
        each = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        is_said = done < total and not self.console.is_terminal  # a terminal has a column for it
        left = f", {duration(each * (total - done))} left" if is_said else ""
        self.step("iteration", done, total, f"{figures}  {each:.3g} s each{left}")

    def note(self, text: str) -> None:
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def warning(self, text: str) -> None:
        self.console.print(f"warning: {printable(text)}", markup=False, highlight=False, soft_wrap=True)
