"""Call a function of the user with the metrics of each iteration, in a process beside the run or grid.

An error of the function does not reach the run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_repro.base.errors import UserError
from ppo_repro.user.file import load_callable

if TYPE_CHECKING:
    from ppo_repro.records.manifest import Head
    from ppo_repro.tracking.scalars import Scalar

FIELD = "--track"


def load(path: str) -> Callable[..., Any]:
    """Load the function of `FILE.py:FUNCTION`. Raises UserError, which names its fault."""
    return load_callable(FIELD, path, ["metrics"])


def copy(folder: Path, path: str, is_over: Callable[[float], bool]) -> tuple[list[str], dict[str, Any]] | None:
    """Call the function with each iteration until the run or grid is over; None if nothing was recorded.

    The function gets a dict: `run`, the folder of the run, `iteration`, and every number of that row of the table
    `iterations`. Returns the printed lines and their fields. Raises UserError, which names file and line if the
    function raises.
    """
    from ppo_repro.tracking.following import follow

    function = load(path)
    copies = follow(folder, is_over, lambda run_dir, row: _Calls(run_dir, function))
    if not copies:
        return None
    count = sum(calls.count for calls in copies)
    return [f"told        {path} of {count} iterations"], {"path": path, "iterations": count}


class _Calls:
    """Copy of one run, made by calls of the user's function."""

    def __init__(self, run_dir: Path, function: Callable[..., Any]) -> None:
        self.count, self._run_dir, self._function = 0, run_dir, function

    def log(self, scalars: Sequence[Scalar]) -> None:
        iterations: dict[int, dict[str, Any]] = {}
        for scalar in scalars:
            group, _, name = scalar.name.partition("/")
            if group == "iteration":
                metrics = iterations.setdefault(scalar.step, {"run": str(self._run_dir), "iteration": scalar.step})
                metrics[name] = scalar.value
        for metrics in iterations.values():
            self._function(metrics)
            self.count += 1

    def end(self, head: Head, last: Sequence[Scalar]) -> None:
        pass  # the function hears of iterations alone

    def give_up(self) -> None:
        pass


if __name__ == "__main__":  # a new process tries the function before the run begins
    try:
        load(sys.argv[1])
    except UserError as error:
        sys.exit(str(error))
