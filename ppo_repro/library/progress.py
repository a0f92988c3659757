"""Progress of a run in a notebook: a line for each phase, which is updated in place."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppo_repro.commands.progress import ConsoleProgress
from ppo_repro.records import reader

OnIteration = Callable[[Any], object]  # takes a row of the table `iterations`, a pandas Series
SECONDS = 0.2  # between two updates of a line


def in_notebook() -> bool:
    """Whether a kernel of Jupyter runs this process; IPython is not imported for it."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return getattr(shell, "kernel", None) is not None


class LibraryProgress(ConsoleProgress):
    """Shows lines in a notebook, elsewhere what `ppo-repro run` shows, and tells a function of each iteration."""

    def __init__(self, run_dir: Path, on_iteration: OnIteration | None, progress: bool) -> None:
        super().__init__()
        self._run_dir, self._on_iteration, self._progress = run_dir, on_iteration, progress
        self._in_notebook = in_notebook()
        self._lines: dict[str, Any] = {}  # IPython's handles
        self._shown: dict[str, float] = {}  # when, in seconds

    def _show(self, name: str, done: int, total: int, note: str) -> None:
        if not self._progress:
            return
        if not self._in_notebook:
            super()._show(name, done, total, note)
            return
        now = time.monotonic()
        self._first.setdefault(name, (done, now))
        if done < total and now - self._shown.get(name, 0.0) < SECONDS:
            return
        self._shown[name] = now
        from IPython.display import display  # a kernel has it

        line = {"text/plain": f"{name} {done}/{total}: {note}{self._left(name, done, total)}"}
        if name in self._lines:
            self._lines[name].update(line, raw=True)
        else:
            self._lines[name] = display(line, raw=True, display_id=True)

    def iteration(self, done: int, total: int, figures: str) -> None:
        super().iteration(done, total, figures)
        if self._on_iteration is not None:
            rows = reader.read_iterations(self._run_dir, iterations=[done - 1], allow_incomplete=True)
            self._on_iteration(rows.iloc[0])

    def warning(self, text: str) -> None:
        warnings.warn(text, stacklevel=2)
