"""Follow a run or a grid's cells in progress; all trackers share this code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import pandas as pd

from ppo_repro.base.analyses import analysis
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import MANIFEST
from ppo_repro.base.output import say
from ppo_repro.grids.cell import run_of
from ppo_repro.records import manifest
from ppo_repro.records.grid import CELLS
from ppo_repro.records.manifest import Head
from ppo_repro.tracking.scalars import RunNumbers, Scalar

POLL_SECONDS = 1.0
ENVIRONMENT_FIELDS = ("code_digest", "git_commit", "git_dirty", "python", "platform")  # copied
# waits for at most the given seconds; returns whether the process that writes records has ended
IsOver = Callable[[float], bool]


class RunCopy(Protocol):
    """Interface of a copy of one run."""

    def log(self, scalars: Sequence[Scalar]) -> None:
        """Copy numbers of new iterations."""
        ...

    def end(self, head: Head, last: Sequence[Scalar]) -> None:
        """Copy the final results and close the copy."""
        ...

    def give_up(self) -> None:
        """Close the copy of a run that failed before its first iteration, and removed its folder."""
        ...


Copy = TypeVar("Copy", bound=RunCopy)


class _Followed(Generic[Copy]):
    """A run that is copied, and how far."""

    def __init__(self, run_dir: Path, copy: Copy) -> None:
        self.copy, self.ended, self._run_dir, self._numbers = copy, False, run_dir, RunNumbers(run_dir)

    @property
    def is_gone(self) -> bool:
        """Return whether the run removed its folder."""
        return not self.ended and not self._run_dir.is_dir()

    def catch_up(self, is_over: bool) -> None:
        """Copy the records since the last call; if the run is complete, or `is_over`, copy the final results too."""
        if self.ended:
            return
        head = manifest.load_head(self._run_dir)
        self.copy.log(self._numbers.new())
        self.ended = is_over or head.status == "complete"
        if self.ended:
            self.copy.end(head, self._numbers.ending())


def begun(folder: Path, is_over: IsOver) -> IsOver | None:
    """Wait until a run or grid has begun; return the `is_over` to use from then on, None if nothing was recorded."""
    over = False
    while not any((folder / name).exists() for name in (MANIFEST, CELLS)):
        if over:
            return None
        over = is_over(POLL_SECONDS)
    return (lambda seconds: True) if over else is_over


def follow(folder: Path, is_over: IsOver, begin: Callable[[Path, dict[str, Any]], Copy]) -> list[Copy]:
    """Copy a run, or the runs of a grid's cells, until it is over; return the copies, none if nothing was recorded.

    A run that removed its folder has no copy. `begin(run folder, row of the table of cells)` begins the copy of a run;
    without a grid the row is empty.
    """
    still = begun(folder, is_over)
    if still is None:
        return []
    followed: dict[int, _Followed[Copy]] = {}  # by the inode of the run's folder, which changes if a cell is run again
    over, is_grid = False, (folder / CELLS).exists()
    while not over:
        over = still(POLL_SECONDS)  # asked before reading: the last iterations are read too
        for run_dir, row in _runs(folder):
            number = None
            try:
                number = run_dir.stat().st_ino
                if number not in followed:
                    followed[number] = _Followed(run_dir, begin(run_dir, row))
                followed[number].catch_up(over)
            except (FileNotFoundError, UserError):
                if run_dir.is_dir() and run_dir.stat().st_ino == number:
                    raise
                # the run failed before its first iteration, and removed its folder just now
        over = over or (not is_grid and all(run.ended for run in followed.values()))
    for run in followed.values():
        if run.is_gone:
            run.copy.give_up()
    return [run.copy for run in followed.values() if not run.is_gone]


def _runs(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield each run of a grid that has begun, with its row of the table of cells. For a run, yield it with no row."""
    if not (folder / CELLS).exists():
        if folder.is_dir():  # a run that fails before its first iteration removes its folder
            yield folder, {}
        return
    for row in pd.read_parquet(folder / CELLS).to_dict("records"):
        run_dir = run_of(folder / "cells" / str(row["cell"]))
        if run_dir is not None:
            yield run_dir, {str(name): value for name, value in row.items()}


def labels_of(row: dict[str, Any]) -> dict[str, str]:
    """Return the labels of a cell's axes by the columns `axis.NAME` of the table."""
    return {name: str(label) for name, label in row.items() if name.startswith("axis.")}


def write_page(folder: Path, path: Path) -> bool:
    """Write the page of a run or grid, and return whether that succeeded. A failure is printed."""
    try:
        analysis("report.build").write_report([folder], path)
    except UserError as error:  # such as a run without iterations, which is copied nevertheless
        say(f"the report page is not in the copy: {error}")
        return False
    return True
