"""Progress of a run in a notebook: a line for each phase, which is updated in place."""

from __future__ import annotations

import sys
import time
from typing import Any

from ppo_repro.commands.progress import ConsoleProgress

SECONDS = 0.2  # between two updates of a line


def in_notebook() -> bool:
    """Whether a kernel of Jupyter runs this process; IPython is not imported for it."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return getattr(shell, "kernel", None) is not None


class NotebookProgress(ConsoleProgress):
    """Lines in a notebook; elsewhere what `ppo-repro run` shows."""

    def __init__(self) -> None:
        super().__init__()
        self._in_notebook = in_notebook()
        self._lines: dict[str, Any] = {}  # IPython's handles
        self._shown: dict[str, float] = {}  # when, in seconds

    def _show(self, name: str, done: int, total: int, note: str) -> None:
        if not self._in_notebook:
            super()._show(name, done, total, note)
            return
        now = time.monotonic()
        self._first.setdefault(name, (done, now))
        if done < total and now - self._shown.get(name, 0.0) < SECONDS:
            return
        self._shown[name] = now
        self._say(name, f"{name} {done}/{total}: {note}{self._left(name, done, total)}")

    def _say(self, name: str, text: str) -> None:
        from IPython.display import display  # a kernel has it

        line = {"text/plain": text}
        if name in self._lines:
            self._lines[name].update(line, raw=True)
        else:
            self._lines[name] = display(line, raw=True, display_id=True)
