"""The report at the end of a grid, as text and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppo_repro.grids.grid import Outcome
from ppo_repro.grids.results import CELLS, RESULTS
from ppo_repro.grids.spec import Grid

SHOWN = ("eval_accuracy", "eval_score")  # final results shown in the table


def lines(grid: Grid, folder: Path, outcome: Outcome) -> list[str]:
    """Question, one line per cell, and the paths of the tables."""
    table = outcome.table
    columns = ["cell", "state", "iterations", *(f"final.{name}" for name in SHOWN if f"final.{name}" in table.columns)]
    shown = table[columns].rename(columns=lambda name: name.removeprefix("final."))
    shown["fingerprint"] = table["fingerprint"].str[:12]
    complete = int((table["state"] == "complete").sum())
    failed = table[table["message"] != ""]
    codes = sorted({code for codes in table["code_digest"] for code in codes.split(",") if code})
    return [
        f"question     {grid.file.question}",
        f"expectation  {grid.file.expectation}",
        shown.to_string(index=False, float_format=lambda x: f"{x:.4g}"),
        *(f"{row['cell']}: {row['message']}" for row in failed.to_dict("records")),
        *(f"{name}: in the folder, but not in the grid file; ignored" for name in outcome.strangers),
        *([f"computed by {len(codes)} versions of the code; see column code_digest"] if len(codes) > 1 else []),
        f"{complete} of {len(table)} cells complete; {len(outcome.ran)} run now",
        f"tables       {folder / CELLS}, {folder / RESULTS}",
        *([f"read with    {grid.file.read_with}"] if grid.file.read_with else []),
    ]


def as_json(grid: Grid, folder: Path, outcome: Outcome) -> dict[str, Any]:
    """The same as JSON."""
    cells = outcome.table[["cell", "state", "fingerprint", "message", "run_dir"]].to_dict("records")
    return {
        "grid": grid.name,
        "folder": str(folder),
        "complete": int((outcome.table["state"] == "complete").sum()),
        "ran": list(outcome.ran),
        "strangers": list(outcome.strangers),
        "cells": cells,
    }
