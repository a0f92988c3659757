"""Executed notebooks, one for each question; `python -m ppo_repro.analysis.notebooks` executes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ppo_repro.base.errors import UserError

# the environment variables of notebooks, and the folder of the recorded run or grid that each one replaces
RECORDED = {"PPO_RUN": "deterministic", "PPO_OTHER_RUN": "native", "PPO_GRID": "clip"}
RUNS = Path(__file__).resolve().parents[2] / "runs" / "notebooks"


def folder_of(variable: str) -> Path:
    """Return the folder in an environment variable, or else the run that the notebooks recorded.

    Raises UserError if neither exists.
    """
    if os.environ.get(variable):
        return Path(os.environ[variable])
    recorded = RUNS / RECORDED[variable]
    if variable != "PPO_GRID":
        recorded = next((path.parent for path in sorted(recorded.glob("*/*/manifest.json"))), recorded)
    if not recorded.is_dir():
        what = "grid" if variable == "PPO_GRID" else "run"
        raise UserError(
            f"{variable}: set it to the folder of a {what}, or record one: python -m ppo_repro.analysis.notebooks"
        )
    return recorded


def opened(variable: str) -> Any:
    """Return the recorded run in `folder_of(variable)`."""
    import ppo_repro

    return ppo_repro.open_run(folder_of(variable))
