"""Run a grid: lay out its cells, run the cells that are not complete, write the tables.

`cells.parquet` has one row per cell in any state, and changes when a cell ends. `results.parquet` has one row per
iteration of each complete cell: the columns of the cell, then the columns of the table `iterations`. It is written when
the grid begins and ends.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import atomic_write
from ppo_repro.base.lock import only_writer
from ppo_repro.base.output import say_anyway
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.files import dump_yaml, load_any
from ppo_repro.config.inputs import gather
from ppo_repro.config.kinds import AnyConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.grids.cell import Order, cell_state, last_result, run_of, state_from
from ppo_repro.grids.executor import Executor
from ppo_repro.grids.spec import Cell, Grid
from ppo_repro.records import manifest, reader
from ppo_repro.records.changes import change_lines, config_changes
from ppo_repro.records.grid import CELLS, GRID, RESULTS, axes_of
from ppo_repro.records.notes import read_environments
from ppo_repro.runs.environment import describe_code, describe_environment
from ppo_repro.runs.run import NO_TRACKING

SHOWN = ("final.eval_accuracy", "final.eval_score")  # columns of the printed table
SHOWN_FIELDS = 8  # of a configuration that has changed
# parts of an environment that can change every result, and parts that can change results of some cells only
CHANGING = ("code_digest", "python", "packages")
OF_MACHINE = ("machine", "cpu_capability", "torch_build")

CellRow = dict[str, object]


@dataclass(frozen=True)
class Outcome:
    """Result of one call of `run_grid`."""

    table: pd.DataFrame  # cells.parquet
    ran: tuple[str, ...]  # cells that this call started


def run_grid(
    grid: Grid,
    out: Path,
    executor: Executor,
    keep_changed: bool = False,
    tracking: AbstractContextManager[object] = NO_TRACKING,
    processes: int = 1,
) -> Outcome:
    """Run every cell that is not complete, and write the tables in OUT/<name of the grid file>.

    A second call runs only missing cells. A cell that fails or is killed is recorded, and the other cells go on.

    Args:
        executor: runs cells, here or on a cluster.
        keep_changed: keep complete cells that other code, packages or input files computed.
        tracking: copies the grid to trackers; this context is open while this call has the grid's lock.
        processes: number of processes of each cell, on one machine.

    Raises:
        UserError: the executor cannot run cells, another call works on the same folder, a cell's configuration has
            changed, or, without `keep_changed`, other code, packages or input files computed a cell.
    """
    executor.check()
    grid_dir = out / grid.name
    with only_writer(grid_dir), tracking:
        try:
            (grid_dir / "cells").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{grid_dir}: cannot be written ({error.strerror}); choose another --out") from error
        # first, because a call that a cell refuses must change no file
        orders = _orders(grid, grid_dir, keep_changed, processes)
        atomic_write(grid_dir / GRID, dump_yaml(grid.file).encode())
        for cell in grid.cells:
            write_config(cell, grid_dir / "cells" / cell.name)
        write_tables(grid_dir, grid)  # a tracker that copies the grid meanwhile reads the labels there
        say_anyway(f"{len(grid.cells) - len(orders)} of {len(grid.cells)} cells are complete already")
        try:
            if orders:
                _run(grid, grid_dir, executor, orders)
        finally:
            table = write_tables(grid_dir, grid)
    return Outcome(table, tuple(order.name for order in orders))


def _orders(grid: Grid, grid_dir: Path, keep_changed: bool, processes: int) -> list[Order]:
    """Check all cells, and return an order for each cell that is not complete."""
    orders, code = list[Order](), describe_code()
    for cell in grid.cells:
        folder = grid_dir / "cells" / cell.name
        _check_config(cell, folder)
        if not keep_changed:
            check_unchanged(cell, folder, code)
        if cell_state(folder) != "complete":
            orders.append(Order(cell.name, str(folder.absolute()), cell.config.layout.threads, processes))
    return orders


def _run(grid: Grid, grid_dir: Path, executor: Executor, orders: Sequence[Order]) -> None:
    """Run the cells; when one ends, write the table of cells and print a line."""
    cells = {cell.name: cell for cell in grid.cells}
    rows = {name: _cell_row(grid_dir, cell) for name, cell in cells.items()}
    with closing(executor.run(orders)) as results:
        for ended, result in enumerate(results, len(cells) - len(orders) + 1):
            with suppress(UserError):  # of one cell; the tables at the end name it
                rows[result.name] = _cell_row(grid_dir, cells[result.name])
                _write(grid_dir / CELLS, pd.DataFrame([*rows.values()]))
            outcome = f"ended with {result.exit_code}: {result.message}" if result.exit_code else "done"
            say_anyway(f"{ended}/{len(cells)} {result.name}: {outcome} ({result.seconds:.1f} s)")


def write_config(cell: Cell, folder: Path) -> None:
    """Write the configuration of a cell that has no run yet."""
    if run_of(folder) is None:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / "config.yaml", dump_yaml(cell.config).encode())


def _check_config(cell: Cell, folder: Path) -> None:
    """Raise UserError, naming fields and values, if the cell's folder has another configuration."""
    path = folder / "config.yaml"
    if path.exists():
        before = load_any(path)[1]
        if before.canonical_json() != cell.config.canonical_json():
            fields = [n for n in change_lines(config_changes(before, cell.config)) if not n.startswith("records.")]
            more = f" and {len(fields) - SHOWN_FIELDS} more" if len(fields) > SHOWN_FIELDS else ""
            raise UserError(
                f"{folder}: was made from another configuration than the grid file has now "
                f"({', '.join(fields[:SHOWN_FIELDS])}{more}); rename the grid file, or choose another --out"
            )


def check_unchanged(cell: Cell, folder: Path, code: Mapping[str, object]) -> None:
    """Raise UserError if code other than `code`, other packages or other input files computed the run of a cell.

    Another kind of machine counts if it may compute other bits.
    """
    run_dir = run_of(folder)
    if run_dir is None:
        return
    recorded = manifest.load_head(run_dir)
    changing = CHANGING if is_same_everywhere(cell.config) else CHANGING + OF_MACHINE
    before, now = read_environments(run_dir, recorded), describe_environment(cell.config, 1, code)
    what = [name for name in changing if any(environment[name] != now[name] for environment in before)]
    if gather(cell.config).digests != recorded.inputs:
        what.append("input file")
    if what:
        raise UserError(
            f"{folder}: was computed with another {', '.join(what)} than now; --keep-changed leaves such cells as "
            f"they are (the tables say so), and without {run_dir} the cell is run again"
        )


def is_same_everywhere(config: AnyConfig) -> bool:
    """Return whether every machine computes the same bits; environments of Gymnasium take sines from the C library."""
    if isinstance(config, RunConfig):
        return config.machine_dependent_setting is None and config.rollout.engine_without_promise is None
    return isinstance(config, DPOConfig) and config.numerics.mode == "deterministic"


def write_tables(grid_dir: Path, grid: Grid) -> pd.DataFrame:
    """Write both tables, each completely or not at all, and return the table of cells.

    Raises UserError on damaged records.
    """
    table = pd.DataFrame([_cell_row(grid_dir, cell) for cell in grid.cells])
    _write(grid_dir / CELLS, table)
    _write(grid_dir / RESULTS, _results_table(grid_dir, table))
    return table


def _write(path: Path, table: pd.DataFrame) -> None:
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False, compression="zstd")
    atomic_write(path, buffer.getvalue())


def _cell_row(grid_dir: Path, cell: Cell) -> CellRow:
    folder = grid_dir / "cells" / cell.name
    run_dir, last = run_of(folder), last_result(folder)
    recorded = None if run_dir is None else manifest.load_head(run_dir)
    state = state_from(recorded, last)
    codes: set[str] = set()  # of the start and of every resume
    if run_dir is not None and recorded is not None:
        codes = {environment["code_digest"] for environment in read_environments(run_dir, recorded)}
    return {
        "cell": cell.name,
        **{f"axis.{axis}": label for axis, label in cell.labels.items()},
        "seed": cell.seed,
        "state": state,
        "iterations": recorded.num_iterations if recorded else 0,
        "fingerprint": recorded.fingerprint if recorded and state == "complete" else "",
        "config_digest": cell.config.digest(),
        "code_digest": ",".join(sorted(codes)),
        "message": last.message if last and state != "complete" else "",
        "run_dir": str(run_dir.relative_to(grid_dir)) if run_dir else "",
        **{f"final.{k}": v for k, v in (recorded.final.items() if recorded else ()) if not isinstance(v, str)},
    }


def _results_table(grid_dir: Path, table: pd.DataFrame) -> pd.DataFrame:
    """Return one row per iteration of each complete cell. Raises UserError on damaged records."""
    cell_columns = ["cell", *axes_of(table), "seed", "fingerprint", "code_digest"]
    frames = []
    for row in table[table["state"] == "complete"].to_dict("records"):
        frame = reader.read_iterations(grid_dir / str(row["run_dir"]))
        for position, name in enumerate(cell_columns):
            frame.insert(position, name, row[name])
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=cell_columns)


def lines(grid: Grid, folder: Path, outcome: Outcome) -> list[str]:
    """Return the printed lines: the question, one line per cell, and the paths of the tables."""
    table = outcome.table
    judged = all(not isinstance(cell.config, RunConfig) or cell.config.reward.judges for cell in grid.cells)
    measures = [name for name in SHOWN if name in table.columns and (judged or name != SHOWN[0])]
    columns = ["cell", "state", "iterations", *measures]
    shown = table[columns].rename(columns=lambda name: name.removeprefix("final."))
    shown["fingerprint"] = table["fingerprint"].str[:12]
    codes = {code for codes in table["code_digest"] for code in codes.split(",") if code}
    return [
        f"question     {grid.file.question}",
        f"expectation  {grid.file.expectation}",
        shown.to_string(index=False, float_format=lambda x: f"{x:.4g}"),
        *(f"{row['cell']}: {row['message']}" for row in table[table["message"] != ""].to_dict("records")),
        *([f"computed by {len(codes)} versions of the code; see column code_digest"] if len(codes) > 1 else []),
        f"{(table['state'] == 'complete').sum()} of {len(table)} cells complete; {len(outcome.ran)} run now",
        f"tables       {folder / CELLS}, {folder / RESULTS}",
        *([f"read with    {grid.file.read_with}"] if grid.file.read_with else []),
        f"page         ppo-repro report {shlex.quote(str(folder))}",
    ]
