"""Follow a run or a grid's cells in progress; all trackers share this code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pandas as pd

from ppo_repro.grids.cell import run_of
from ppo_repro.records import manifest
from ppo_repro.records.grid import CELLS

POLL_SECONDS = 1.0
OF_ENVIRONMENT = ("code_digest", "git_commit", "git_dirty", "python", "platform")  # copied
# waits for at most the given seconds; returns whether the process that writes records has ended
IsOver = Callable[[float], bool]


class RunCopy(Protocol):
    """Interface of a copy of one run."""

    ended: bool

    def catch_up(self, is_over: bool) -> None:
        """Copy the records since the last call; if the run is complete, or `is_over`, copy the final results too."""
        ...


Copy = TypeVar("Copy", bound=RunCopy)


def begun(folder: Path, is_over: IsOver) -> IsOver | None:
    """Wait until a run or grid has begun; return the `is_over` to use from then on, None if nothing was recorded."""
    over = False
    while not any((folder / name).exists() for name in (manifest.FILE_NAME, CELLS)):
        if over:
            return None
        over = is_over(POLL_SECONDS)
    return (lambda seconds: True) if over else is_over


def follow_run(copy: RunCopy, is_over: IsOver) -> None:
    """Copy a run until it is over."""
    while not copy.ended:
        copy.catch_up(is_over(POLL_SECONDS))  # asked before reading: the last iterations are read too


def follow_cells(
    grid_dir: Path, is_over: IsOver, begin: Callable[[Path, dict[str, Any]], Copy]
) -> tuple[list[Copy], pd.DataFrame]:
    """Copy the runs of a grid's cells until the grid is over; return the copies and the last table of cells.

    `begin(run folder, row of the table)` makes the copy of a run that has begun.
    """
    copies: dict[int, Copy] = {}  # by the inode of the run's folder, which changes if a cell is run again
    over = False
    while not over:
        over = is_over(POLL_SECONDS)
        cells = pd.read_parquet(grid_dir / CELLS)
        for row in cells.to_dict("records"):
            run_dir = run_of(grid_dir / "cells" / str(row["cell"]))
            if run_dir is None:
                continue
            number = run_dir.stat().st_ino
            if number not in copies:
                copies[number] = begin(run_dir, {str(name): value for name, value in row.items()})
            copies[number].catch_up(over)
    return list(copies.values()), cells


def labels_of(row: dict[str, Any]) -> dict[str, str]:
    """Return the labels of a cell's axes by the columns `axis.NAME` of the table."""
    return {name: str(label) for name, label in row.items() if name.startswith("axis.")}
