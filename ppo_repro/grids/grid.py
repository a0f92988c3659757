"""Running a grid: lay out its cells, run those that are not complete, write the tables."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd

from ppo_repro.config.files import dump_yaml
from ppo_repro.errors import UserError
from ppo_repro.files import atomic_write, only_writer, remove_folder
from ppo_repro.grids.cell import Order, environment_of, run_of, state_of, without_code
from ppo_repro.grids.engines import Engine
from ppo_repro.grids.progress import GridWatcher
from ppo_repro.grids.results import write_tables
from ppo_repro.grids.spec import Cell, Grid
from ppo_repro.runs.environment import describe_environment

Changed = Literal["refuse", "keep", "redo"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one call of `run_grid`."""

    table: pd.DataFrame  # `results.cells_table`
    ran: tuple[str, ...]  # cells that this call started
    strangers: tuple[str, ...]  # cells in the folder that are not in the grid file any more


def grid_folder(grid: Grid, out: Path) -> Path:
    """OUT/<name of the grid file>."""
    return out / grid.name


def _lay_out(grid: Grid, grid_dir: Path) -> None:
    """Make a folder with a configuration for each cell; UserError where a cell has another configuration already."""
    for cell in grid.cells:
        folder = grid_dir / "cells" / cell.name
        path = folder / "config.yaml"
        text = dump_yaml(cell.config)
        if path.exists():
            if path.read_text(encoding="utf-8") != text:
                raise UserError(
                    f"{folder}: was made from another configuration than the grid file has now; "
                    "rename the grid file, or choose another --out"
                )
            continue
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text.encode())


def _differs(cell: Cell, folder: Path) -> str:
    """What has changed since the recorded part of a cell was computed: "code", or parts of the environment."""
    recorded = environment_of(folder)
    if not recorded:
        return ""
    now = describe_environment(cell.config, 1)
    if set(recorded["code_digest"]) != {now["code_digest"]}:
        return "code"
    changed = [name for name, value in without_code(now).items() if recorded[name] != value]
    return ", ".join(changed)


def _check_unchanged(grid: Grid, grid_dir: Path, changed: Changed) -> None:
    """Refuse, keep or remove the runs that other code or another environment computed."""
    for cell in grid.cells:
        folder = grid_dir / "cells" / cell.name
        what = _differs(cell, folder)
        if not what or changed == "keep":
            continue
        if changed == "refuse":
            raise UserError(
                f"{folder}: was computed with another {what} than now; "
                "--changed keep leaves such cells as they are (the tables say so), --changed redo runs them again"
            )
        run_dir = run_of(folder)
        assert run_dir is not None
        with only_writer(run_dir):
            remove_folder(run_dir)


def _orders(grid: Grid, grid_dir: Path) -> list[Order]:
    """The cells that are not complete."""
    orders = []
    for cell in grid.cells:
        folder, layout = grid_dir / "cells" / cell.name, cell.config.layout
        if state_of(folder) != "complete":
            orders.append(Order(cell.name, str(folder.absolute()), grid.file.kind, layout.threads))
    return orders


def _strangers(grid: Grid, grid_dir: Path) -> tuple[str, ...]:
    ours = {cell.name for cell in grid.cells}
    return tuple(sorted(path.name for path in (grid_dir / "cells").iterdir() if path.name not in ours))


def run_grid(
    grid: Grid,
    out: Path,
    engine: Engine,
    watcher: GridWatcher,
    changed: Changed = "refuse",
) -> Outcome:
    """Run every cell that is not complete, and write the tables. A second call runs only what is missing.

    A cell that fails or is killed is recorded and does not stop the others. UserError where the engine cannot run
    cells, another call works on the same folder, a cell's configuration has changed, or other code computed a cell
    (see `changed`).
    """
    engine.check()
    grid_dir = grid_folder(grid, out)
    try:
        (grid_dir / "cells").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{grid_dir}: cannot be written ({error.strerror}); choose another --out") from error
    with only_writer(grid_dir):
        atomic_write(grid_dir / "grid.yaml", dump_yaml(grid.file).encode())
        _lay_out(grid, grid_dir)
        _check_unchanged(grid, grid_dir, changed)
        orders = _orders(grid, grid_dir)
        try:
            _work(engine, orders, watcher, len(grid.cells))
        finally:
            table = write_tables(grid_dir, grid.cells)
    return Outcome(table, tuple(order.name for order in orders), _strangers(grid, grid_dir))


def _work(engine: Engine, orders: Sequence[Order], watcher: GridWatcher, cells: int) -> None:
    watcher.begin(orders, cells)
    if not orders:
        return
    results = engine.run(orders)
    with closing(results):  # type: ignore[type-var]
        for result in results:
            if result is None:
                watcher.look()
            else:
                watcher.ended(result)
