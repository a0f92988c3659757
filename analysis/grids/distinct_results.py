"""How many different results does one seed have? `python -m analysis.grids.distinct_results GRID --by FIELD`

One row per value of the axis FIELD and seed: how many cells differ only in the other axes, and how many fingerprints
they have. Where the other axes must not change a result, that number is one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.grids.table import markdown
from ppo_repro.errors import UserError


def results_by_seed(cells: pd.DataFrame, by: str) -> pd.DataFrame:
    """One row per label of axis `by` and seed: cells, complete cells and fingerprints; UserError for another axis."""
    axes = [name.removeprefix("axis.") for name in cells.columns if name.startswith("axis.")]
    if by not in axes:
        raise UserError(f"--by {by}: is no axis of this grid; there are {', '.join(axes)}")
    rows = []
    for (label, seed), group in cells.groupby([f"axis.{by}", "seed"], sort=False):
        complete = group[group["state"] == "complete"]
        fingerprints = complete["fingerprint"].nunique()
        rows.append({by: label, "seed": seed, "cells": len(group), "complete": len(complete), "results": fingerprints})
    return pd.DataFrame(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; exit code 2 and one line on a user error."""
    parser = argparse.ArgumentParser(description="how many different results one seed has")
    parser.add_argument("grid", type=Path, help="folder of a grid")
    parser.add_argument("--by", required=True, help="the axis that may change a result, such as numerics.mode")
    arguments = parser.parse_args(argv)
    try:
        if not (arguments.grid / "cells.parquet").exists():
            raise UserError(f"{arguments.grid}: has no cells.parquet; run `ppo-repro grid` on its file first")
        print(markdown(results_by_seed(pd.read_parquet(arguments.grid / "cells.parquet"), arguments.by)))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
