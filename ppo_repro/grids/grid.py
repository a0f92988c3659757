"""Running a grid: lay out its cells, run the cells that are not complete, write the tables."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd

from ppo_repro.config.files import dump_yaml
from ppo_repro.config.inputs import run_folder
from ppo_repro.errors import UserError
from ppo_repro.files import atomic_write, only_writer, remove_folder
from ppo_repro.grids.cell import Order, environment_of, run_of, state_of, without_code
from ppo_repro.grids.engines import Engine
from ppo_repro.grids.progress import ConsoleGrid
from ppo_repro.grids.results import write_tables
from ppo_repro.grids.spec import Cell, Grid
from ppo_repro.runs.environment import describe_environment

Changed = Literal["refuse", "keep", "redo"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one call of `run_grid`."""

    table: pd.DataFrame  # cells.parquet
    ran: tuple[str, ...]  # cells that this call started
    strangers: tuple[str, ...]  # cells in the folder that are not in the grid file any more


def run_grid(grid: Grid, out: Path, engine: Engine, watcher: ConsoleGrid, changed: Changed = "refuse") -> Outcome:
    """Run every cell that is not complete, and write the tables in OUT/<name of the grid file>.

    A second call runs only what is missing. A cell that fails or is killed is recorded and does not stop the others.
    UserError if the engine cannot run cells, another call works on the same folder, a cell's configuration has
    changed, or other code computed a cell (see `changed`).
    """
    engine.check()
    grid_dir = out / grid.name
    try:
        (grid_dir / "cells").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{grid_dir}: cannot be written ({error.strerror}); choose another --out") from error
    with only_writer(grid_dir):
        atomic_write(grid_dir / "grid.yaml", dump_yaml(grid.file).encode())
        for cell in grid.cells:
            lay_out(cell, grid_dir / "cells" / cell.name)
        for cell in grid.cells:
            _check_unchanged(cell, grid_dir / "cells" / cell.name, changed)
        write_tables(grid_dir, grid.cells)  # who copies the grid while it works reads the labels there
        folders = {cell.name: grid_dir / "cells" / cell.name for cell in grid.cells}
        orders = [
            Order(cell.name, str(folders[cell.name].absolute()), grid.file.kind, cell.config.layout.threads)
            for cell in grid.cells
            if state_of(folders[cell.name]) != "complete"
        ]
        watcher.begin(orders, len(grid.cells))
        try:
            if orders:
                with closing(engine.run(orders)) as results:  # type: ignore[type-var]
                    for result in results:
                        watcher.look() if result is None else watcher.ended(result)
        finally:
            table = write_tables(grid_dir, grid.cells)
    strangers = sorted(path.name for path in (grid_dir / "cells").iterdir() if path.name not in folders)
    return Outcome(table, tuple(order.name for order in orders), tuple(strangers))


def lay_out(cell: Cell, folder: Path) -> None:
    """Write the configuration of a cell; UserError if its folder has another configuration."""
    path, text = folder / "config.yaml", dump_yaml(cell.config)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text.encode())
    elif path.read_text(encoding="utf-8") != text:
        raise UserError(
            f"{folder}: was made from another configuration than the grid file has now; "
            "rename the grid file, or choose another --out"
        )


def _check_unchanged(cell: Cell, folder: Path, changed: Changed) -> None:
    """Refuse, keep or remove a run that other code, input files or another environment computed."""
    recorded, run_dir = environment_of(folder), run_of(folder)
    if run_dir is None or changed == "keep":
        return
    now = describe_environment(cell.config, 1)
    parts = [name for name, value in without_code(now).items() if recorded[name] != value]
    what = "code" if set(recorded["code_digest"]) != {now["code_digest"]} else ", ".join(parts)
    if run_folder(cell.config, folder) != run_dir:  # its name follows the inputs
        what = "input file"
    if not what:
        return
    if changed == "refuse":
        raise UserError(
            f"{folder}: was computed with another {what} than now; "
            "--changed keep leaves such cells as they are (the tables say so), --changed redo runs them again"
        )
    with only_writer(run_dir):
        remove_folder(run_dir)
