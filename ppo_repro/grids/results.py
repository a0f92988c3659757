"""The results of a grid as two Parquet tables beside its cells; never imports torch.

`cells.parquet`: one row per cell in any state. `results.parquet`: one row per iteration of each complete cell, the
columns of the `iterations` table after those of the cell.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ppo_repro.files import atomic_write
from ppo_repro.grids.cell import environment_of, last_result, run_of, state_of
from ppo_repro.grids.spec import Cell
from ppo_repro.records import manifest, reader

CELLS = "cells.parquet"
RESULTS = "results.parquet"


def _cell_row(grid_dir: Path, cell: Cell) -> dict[str, object]:
    folder = grid_dir / "cells" / cell.name
    run_dir = run_of(folder)
    recorded = None if run_dir is None else manifest.load(run_dir)
    last = last_result(folder) if folder.exists() else None
    complete = recorded is not None and recorded.status == "complete"
    codes = environment_of(folder).get("code_digest", [])
    return {
        "cell": cell.name,
        **{f"axis.{axis}": label for axis, label in cell.labels.items()},
        "seed": cell.seed,
        "state": state_of(folder),
        "iterations": len(recorded.iterations) if recorded else 0,
        "fingerprint": recorded.fingerprint if recorded and complete else "",
        "config_digest": cell.config.digest(),
        # of the start and of every resume
        "code_digest": ",".join(sorted(set(codes))),
        "message": last.message if last and not complete else "",
        "run_dir": str(run_dir.relative_to(grid_dir)) if run_dir else "",
        **{f"final.{k}": v for k, v in (recorded.final.items() if recorded else ()) if not isinstance(v, str)},
    }


def cells_table(grid_dir: Path, cells: Sequence[Cell]) -> pd.DataFrame:
    """One row per cell: labels, seed, state, fingerprint, final figures; raises UserError on damage."""
    return pd.DataFrame([_cell_row(grid_dir, cell) for cell in cells])


def results_table(grid_dir: Path, table: pd.DataFrame) -> pd.DataFrame:
    """One row per iteration of each complete cell; raises UserError on damaged records."""
    complete = table[table["state"] == "complete"]
    of_cell = ["cell", *(c for c in table.columns if c.startswith("axis.")), "seed", "fingerprint", "code_digest"]
    frames = []
    for row in complete.to_dict("records"):
        frame = reader.read_iterations(grid_dir / str(row["run_dir"]))
        for position, name in enumerate(of_cell):
            frame.insert(position, name, row[name])
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=of_cell)


def write_tables(grid_dir: Path, cells: Sequence[Cell]) -> pd.DataFrame:
    """Write both tables, each completely or not at all; returns the table of cells."""
    table = cells_table(grid_dir, cells)
    for name, frame in ((CELLS, table), (RESULTS, results_table(grid_dir, table))):
        buffer = io.BytesIO()
        frame.to_parquet(buffer, index=False, compression="zstd")
        atomic_write(grid_dir / name, buffer.getvalue())
    return table
