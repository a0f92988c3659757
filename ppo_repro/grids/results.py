"""The results of a grid: two Parquet tables beside its cells, and what the command prints. Never imports torch.

A setting is one combination of the axes' labels; a cell is a setting with a seed, which is one run.
`cells.parquet`: one row per cell in any state. `results.parquet`: one row per iteration of each complete cell, the
columns of the `iterations` table after the columns of the cell.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from ppo_repro.files import atomic_write
from ppo_repro.grids.cell import environment_of, last_result, run_of, state_of
from ppo_repro.grids.spec import Cell, Grid
from ppo_repro.records import manifest, reader

CELLS = "cells.parquet"
RESULTS = "results.parquet"
SHOWN = ("final.eval_accuracy", "final.eval_score")  # columns of the printed table


def _cell_row(grid_dir: Path, cell: Cell) -> dict[str, object]:
    folder = grid_dir / "cells" / cell.name
    run_dir = run_of(folder)
    recorded = None if run_dir is None else manifest.load(run_dir)
    last = last_result(folder) if folder.exists() else None
    complete = recorded is not None and recorded.status == "complete"
    return {
        "cell": cell.name,
        **{f"axis.{axis}": label for axis, label in cell.labels.items()},
        "seed": cell.seed,
        "state": state_of(folder),
        "iterations": len(recorded.iterations) if recorded else 0,
        "fingerprint": recorded.fingerprint if recorded and complete else "",
        "config_digest": cell.config.digest(),
        # of the start and of every resume
        "code_digest": ",".join(sorted(set(environment_of(folder).get("code_digest", [])))),
        "message": last.message if last and not complete else "",
        "run_dir": str(run_dir.relative_to(grid_dir)) if run_dir else "",
        **{f"final.{k}": v for k, v in (recorded.final.items() if recorded else ()) if not isinstance(v, str)},
    }


def _results_table(grid_dir: Path, table: pd.DataFrame) -> pd.DataFrame:
    """One row per iteration of each complete cell; raises UserError on damaged records."""
    of_cell = ["cell", *(c for c in table.columns if c.startswith("axis.")), "seed", "fingerprint", "code_digest"]
    frames = []
    for row in table[table["state"] == "complete"].to_dict("records"):
        frame = reader.read_iterations(grid_dir / str(row["run_dir"]))
        for position, name in enumerate(of_cell):
            frame.insert(position, name, row[name])
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=of_cell)


def write_tables(grid_dir: Path, cells: Sequence[Cell]) -> pd.DataFrame:
    """Write both tables, each completely or not at all; returns the table of cells. UserError on damaged records."""
    table = pd.DataFrame([_cell_row(grid_dir, cell) for cell in cells])
    for name, frame in ((CELLS, table), (RESULTS, _results_table(grid_dir, table))):
        buffer = io.BytesIO()
        frame.to_parquet(buffer, index=False, compression="zstd")
        atomic_write(grid_dir / name, buffer.getvalue())
    return table


def settings_table(cells: pd.DataFrame) -> pd.DataFrame:
    """setting, measure, seeds, mean, half_width: every final evaluation over the seeds of each setting.

    `half_width` is half of the 95 % Student interval, t s / sqrt(n) with n - 1 degrees of freedom; NaN for one seed.
    """
    complete = cells[cells["state"] == "complete"]
    axes = [name for name in cells.columns if name.startswith("axis.")]
    settings = complete[axes].astype(str).agg(", ".join, axis=1) if axes and len(complete) else "all cells"
    rows = []
    for setting, group in complete.assign(setting=settings).groupby("setting", sort=False):
        for name in (name for name in cells.columns if name.startswith("final.eval_")):
            values = group[name].dropna().astype(float)
            half = stats.t.ppf(0.975, len(values) - 1) * values.sem() if len(values) > 1 else float("nan")
            rows.append((setting, name.removeprefix("final."), len(values), values.mean(), half))
    return pd.DataFrame(rows, columns=["setting", "measure", "seeds", "mean", "half_width"])


def lines(grid: Grid, folder: Path, table: pd.DataFrame, ran: Sequence[str], strangers: Sequence[str]) -> list[str]:
    """Question, one line per cell, and the paths of the tables."""
    columns = ["cell", "state", "iterations", *(name for name in SHOWN if name in table.columns)]
    shown = table[columns].rename(columns=lambda name: name.removeprefix("final."))
    shown["fingerprint"] = table["fingerprint"].str[:12]
    failed = table[table["message"] != ""]
    codes = {code for codes in table["code_digest"] for code in codes.split(",") if code}
    return [
        f"question     {grid.file.question}",
        f"expectation  {grid.file.expectation}",
        shown.to_string(index=False, float_format=lambda x: f"{x:.4g}"),
        *(f"{row['cell']}: {row['message']}" for row in failed.to_dict("records")),
        *(f"{name}: in the folder, but not in the grid file; ignored" for name in strangers),
        *([f"computed by {len(codes)} versions of the code; see column code_digest"] if len(codes) > 1 else []),
        f"{(table['state'] == 'complete').sum()} of {len(table)} cells complete; {len(ran)} run now",
        f"tables       {folder / CELLS}, {folder / RESULTS}",
        *([f"read with    {grid.file.read_with}"] if grid.file.read_with else []),
        f"page         ppo-repro report {folder}",
    ]


def fields(
    grid: Grid, folder: Path, table: pd.DataFrame, ran: Sequence[str], strangers: Sequence[str]
) -> dict[str, Any]:
    """The same as fields for JSON."""
    return {
        "grid": grid.name,
        "folder": str(folder),
        "complete": int((table["state"] == "complete").sum()),
        "ran": list(ran),
        "strangers": list(strangers),
        "cells": table[["cell", "state", "fingerprint", "message", "run_dir"]].to_dict("records"),
    }
