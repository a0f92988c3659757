"""The runs and the grid that notebooks show: those of environment variables, or those that execute.py recorded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ppo_repro.base.errors import UserError
from ppo_repro.records import manifest

# the environment variables of notebooks, and the folder below RUNS of the runs or the grid that each one replaces
RECORDED = {"PPO_RUN": "deterministic", "PPO_OTHER_RUN": "native", "PPO_GRID": "clip"}
ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs" / "notebooks"


def folder_of(variable: str) -> Path:
    """Return the folder in an environment variable, or else the run that the notebooks recorded.

    Raises UserError if neither exists.
    """
    if os.environ.get(variable):
        return Path(os.environ[variable])
    if (recorded := recorded_for(variable)) is None:
        what = "grid" if variable == "PPO_GRID" else "run"
        raise UserError(f"{variable}: set it to the folder of a {what}, or record one: python -m analysis.execute")
    return recorded


def recorded_for(variable: str) -> Path | None:
    """Return the grid or the complete run that the notebooks recorded for a variable, if there is one."""
    out = RUNS / RECORDED[variable]
    if variable == "PPO_GRID":
        return out if out.is_dir() else None
    folders = [path.parent for path in sorted(out.glob("*/*/manifest.json"))]
    return next((folder for folder in folders if manifest.load_head(folder).status == "complete"), None)


def opened(variable: str) -> Any:
    """Return the recorded run in `folder_of(variable)`."""
    import ppo_repro

    return ppo_repro.open_run(folder_of(variable))
