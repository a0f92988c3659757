"""What a grid found, as two tidy Parquet tables beside its cells; never imports torch.

`cells.parquet`: one row per cell, whatever became of it. `results.parquet`: one row per iteration of each complete
cell, the columns of the `iterations` table after those of the cell.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ppo_repro.disk import durable
from ppo_repro.grids.cell import environment_of, last_result, run_of, state_of
from ppo_repro.grids.spec import Cell
from ppo_repro.records import manifest, reader

CELLS = "cells.parquet"
RESULTS = "results.parquet"


def _cell_row(grid_dir: Path, cell: Cell) -> dict[str, object]:
    folder = grid_dir / "cells" / cell.name
    run_dir = run_of(folder)
    found = None if run_dir is None else manifest.load(run_dir)
    last = last_result(folder) if folder.exists() else None
    complete = found is not None and found.status == "complete"
    codes = environment_of(folder).get("code_digest", [])
    return {
        "cell": cell.name,
        **{f"axis.{axis}": label for axis, label in cell.labels.items()},
        "seed": cell.seed,
        "state": state_of(folder),
        "iterations": len(found.iterations) if found else 0,
        "fingerprint": found.fingerprint if found and complete else "",
        "config_digest": cell.config.digest(),
        # of the start and of every resumption, where they differ
        "code_digest": ",".join(sorted(set(codes))),
        "message": last.message if last and not complete else "",
        "run_dir": str(run_dir.relative_to(grid_dir)) if run_dir else "",
        **{f"final.{k}": v for k, v in (found.final.items() if found else ()) if not isinstance(v, str)},
    }


def cells_table(grid_dir: Path, cells: Sequence[Cell]) -> pd.DataFrame:
    """One row per cell: labels, seed, state, fingerprint, final figures; raises UserError on damage."""
    return pd.DataFrame([_cell_row(grid_dir, cell) for cell in cells])


def results_table(grid_dir: Path, table: pd.DataFrame) -> pd.DataFrame:
    """One row per iteration of each complete cell; raises UserError on damaged records."""
    complete = table[table["state"] == "complete"]
    about = ["cell", *(c for c in table.columns if c.startswith("axis.")), "seed", "fingerprint", "code_digest"]
    parts = []
    for row in complete.to_dict("records"):
        rows = reader.read_iterations(grid_dir / str(row["run_dir"]))
        for position, name in enumerate(about):
            rows.insert(position, name, row[name])
        parts.append(rows)
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=about)


def write_tables(grid_dir: Path, cells: Sequence[Cell]) -> pd.DataFrame:
    """Write both tables, each whole or not at all; returns the one of the cells."""
    table = cells_table(grid_dir, cells)
    for name, frame in ((CELLS, table), (RESULTS, results_table(grid_dir, table))):
        buffer = io.BytesIO()
        frame.to_parquet(buffer, index=False, compression="zstd")
        durable.atomic_write(grid_dir / name, buffer.getvalue())
    return table
