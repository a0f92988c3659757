"""Name and read the files that a grid writes beside its runs."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa

from ppo_repro.base.errors import UserError

GRID = "grid.yaml"
CELLS = "cells.parquet"  # one row per cell
RESULTS = "results.parquet"  # one row per iteration of each complete cell


def read_grid_table(path: Path) -> pd.DataFrame:
    """Read CELLS or RESULTS of a grid. Raises UserError if the file is missing or damaged."""
    if not path.is_file():
        raise UserError(f"{path}: is missing; give the folder that `ppo-repro grid` wrote")
    try:
        return pd.read_parquet(path)
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read ({reason}); write it again with `ppo-repro grid`") from error


def axes_of(table: pd.DataFrame) -> list[str]:
    """Return the columns `axis.NAME` of a table, which have the labels of the settings."""
    return [str(name) for name in table.columns if str(name).startswith("axis.")]
