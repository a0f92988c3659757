"""Copies of one run or of a grid's cells, made while they work: what every tracker shares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pandas as pd

from ppo_repro.grids.cell import CELLS, run_of
from ppo_repro.records import manifest

POLL_SECONDS = 1.0
OF_ENVIRONMENT = ("code_digest", "git_commit", "git_dirty", "python", "platform")  # what a copy says of it
IsOver = Callable[[float], bool]  # waits at most so many seconds; says whether the process that writes has ended


class RunCopy(Protocol):
    """The copy of one run."""

    ended: bool

    def catch_up(self, is_over: bool) -> None:
        """Copy what was recorded since the last call; the ending once the run is complete or over."""
        ...


Copy = TypeVar("Copy", bound=RunCopy)


def begun(folder: Path, is_over: IsOver) -> IsOver | None:
    """Wait until a run or grid has begun; return how to ask on, None if it is over and nothing was recorded."""
    over = False
    while not any((folder / name).exists() for name in (manifest.FILE_NAME, CELLS)):
        if over:
            return None
        over = is_over(POLL_SECONDS)
    return (lambda seconds: True) if over else is_over


def follow_run(copy: RunCopy, is_over: IsOver) -> None:
    """Copy a run until it is over."""
    while not copy.ended:
        copy.catch_up(is_over(POLL_SECONDS))  # asked before reading, so that the last iterations are read too


def follow_cells(
    grid_dir: Path, is_over: IsOver, begin: Callable[[Path, dict[str, Any]], Copy]
) -> tuple[list[Copy], pd.DataFrame]:
    """Copy the runs of a grid's cells until the grid is over; return the copies and the last table of cells.

    `begin(run folder, row of the table)` makes the copy of a run that has begun.
    """
    copies: dict[int, Copy] = {}  # by the number of the run's folder, which a cell that is run again changes
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
    """Return the labels of a cell's axes, by `axis.NAME`."""
    return {name: str(label) for name, label in row.items() if name.startswith("axis.")}
