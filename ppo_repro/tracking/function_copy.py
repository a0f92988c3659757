"""Call a function of the user with the metrics of each iteration, in a process beside the run or grid.

An error of the function does not reach the run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from ppo_repro.base.errors import UserError
from ppo_repro.user.file import load_callable

FIELD = "--track"


def load(path: str) -> Callable[..., Any]:
    """Load the function of `FILE.py:FUNCTION`. Raises UserError, which names its fault."""
    return load_callable(FIELD, path, ["metrics"])


def copy(folder: Path, path: str, is_over: Callable[[float], bool]) -> int:
    """Call the function with each iteration until the run or grid is over; return the number of calls.

    The function gets a dict: `run`, the folder of the run, `iteration`, and every number of that row of the table
    `iterations`. Raises UserError, which names file and line if the function raises.
    """
    from ppo_repro.records.grid import CELLS
    from ppo_repro.tracking.following import begun, follow_cells, follow_run

    follow, still = load(path), begun(folder, is_over)
    if still is None:
        return 0
    if (folder / CELLS).exists():
        copies, _ = follow_cells(folder, still, lambda run_dir, row: _Calls(run_dir, follow))
        return sum(calls.count for calls in copies)
    calls = _Calls(folder, follow)
    follow_run(calls, still)
    return calls.count


class _Calls:
    """Copy of one run, made by calls of the user's function."""

    def __init__(self, run_dir: Path, follow: Callable[..., Any]) -> None:
        from ppo_repro.tracking.numbers import RunNumbers

        self.ended, self.count = False, 0
        self._run_dir, self._follow, self._numbers = run_dir, follow, RunNumbers(run_dir)

    def catch_up(self, is_over: bool) -> None:
        from ppo_repro.records import manifest

        if self.ended:
            return
        self.ended = manifest.load_head(self._run_dir).status == "complete" or is_over
        iterations: dict[int, dict[str, Any]] = {}
        for scalar in self._numbers.new():
            group, _, name = scalar.name.partition("/")
            if group == "iteration":
                metrics = iterations.setdefault(scalar.step, {"run": str(self._run_dir), "iteration": scalar.step})
                metrics[name] = scalar.value
        for metrics in iterations.values():
            with redirect_stdout(sys.stderr):  # stdout belongs to the command
                self._follow(metrics)
            self.count += 1


if __name__ == "__main__":  # a new process tries the function before the run begins
    try:
        load(sys.argv[1])
    except UserError as error:
        sys.exit(str(error))
