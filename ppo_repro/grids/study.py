"""Reproduce a study: a grid, the committed results of its cells, the program that makes them, and a page.

`STUDY/NAME.yaml` is the grid, and `results.csv` has one row per cell. `python -m FOLDER.NAME.answer` makes results.csv
from runs, and prints the tables of the page `README.md`.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ppo_repro.base.errors import UserError
from ppo_repro.base.seeding import permutation
from ppo_repro.grids.executor import Processes
from ppo_repro.grids.grid import is_same_everywhere, run_grid
from ppo_repro.grids.spec import Cell, Grid, load_grid

RESULTS, PAGE = "results.csv", "README.md"
BESIDE = "beside"  # column of results: the other cell that the measures of a cell compare it with

ResultRow = Mapping[str, str]


@dataclass(frozen=True)
class Reproduction:
    """Result of running some cells of a study again."""

    cells: tuple[str, ...]
    difference: str  # the first different fingerprint, measure or table; empty if there is none
    folder: str  # folder of the new runs


def reproduce(study: Path, count: int, seed: int, out: Path, workers: int) -> Reproduction:
    """Run some cells of a study again; compare fingerprints, measures and tables with the study's files.

    Cells in native numerics are never chosen: their bits belong to a machine.

    Args:
        study: a folder with grid file, results and page.
        count: number of cells.
        workers: cells at once.

    Raises:
        UserError: the study's files are missing, wrong or incomplete.
    """
    study = study.resolve()
    grid, committed = load_grid(study / f"{study.name}.yaml"), read_results(study / RESULTS)
    if missing := [cell.name for cell in grid.cells if cell.name not in committed]:
        raise UserError(f"{study / RESULTS}: has no row for cell {missing[0]} of the grid; make it from runs again")
    cells = chosen_cells(grid, committed, count, seed)
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{study.name}-", dir=out))
    outcome = run_grid(replace(grid, cells=cells), folder, Processes(workers))
    runs, names = folder / grid.name, tuple(cell.name for cell in cells)
    for row in outcome.table.to_dict("records"):
        if row["state"] != "complete":
            return Reproduction(names, f"{row['cell']}: {row['message']}", str(runs))
    _answer(study, str(runs), "--csv", str(runs / RESULTS))
    difference = first_changed_value(committed, read_results(runs / RESULTS))
    if not difference:
        page = (study / PAGE).read_text(encoding="utf-8").splitlines()
        absent = next((line for line in _answer(study).splitlines() if line and line not in page), None)
        difference = "" if absent is None else f"{PAGE}: lacks this line of the tables that {RESULTS} gives: {absent}"
    return Reproduction(names, difference, str(runs))


def read_results(path: Path) -> dict[str, ResultRow]:
    """Read the rows of a study's results by cell name. Raises UserError if the file is missing or wrong."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; `python -m FOLDER.STUDY.answer RUNS` makes it from runs")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"cell", "fingerprint"} <= set(rows[0]):
        raise UserError(f"{path}: must have columns cell and fingerprint, and a row for each cell")
    return {row["cell"]: row for row in rows}


def chosen_cells(grid: Grid, committed: Mapping[str, ResultRow], count: int, seed: int) -> tuple[Cell, ...]:
    """Choose cells that every machine repeats bit by bit, and add the cells with which their measures compare them.

    Args:
        committed: rows of the results by cell, with the column BESIDE.
        count: number of chosen cells, without the added cells.

    Raises:
        UserError: the grid has fewer such cells.
    """
    exact = [cell for cell in grid.cells if is_same_everywhere(cell.config)]
    if not 1 <= count <= len(exact):
        raise UserError(f"--cells {count}: must be from 1 to {len(exact)}, the cells that every machine repeats")
    names = {exact[i].name for i in permutation(len(exact), "reproduce", seed)[:count]}
    names |= {committed[name].get(BESIDE, "") for name in names}
    return tuple(cell for cell in grid.cells if cell.name in names)


def first_changed_value(committed: Mapping[str, ResultRow], now: Mapping[str, ResultRow]) -> str:
    """Describe the first value of `now` that differs from the committed value; "" if all are equal."""
    for cell, row in now.items():
        for column, value in row.items():
            if column not in committed[cell]:
                return f"{cell}: {column} is {value}, and {RESULTS} has no such column; does it have an earlier name?"
            if value != committed[cell][column]:
                return f"{cell}: {column} is {value}, and {committed[cell][column]} in {RESULTS}"
    return ""


def _answer(study: Path, *arguments: str) -> str:
    """Run a study's program and return its output. If it fails, raises UserError with the last line."""
    command: Sequence[str] = (sys.executable, "-m", f"{study.parent.name}.{study.name}.answer", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, cwd=study.parent.parent, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise UserError(f"{study}: `python -m {command[2]}` failed ({last}); start it from {study.parent.parent}")
    return done.stdout
