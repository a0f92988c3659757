"""How many different results does one seed have? `python -m analysis.grids.distinct_results GRID --by FIELD`

One row per value of the axis FIELD and seed: how many cells differ only in the other axes, and how many fingerprints
they have. Where the other axes must not change a result, that number is one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.grids.outcomes import cells_of
from analysis.grids.table import markdown
from analysis.program import program
from ppo_repro.errors import UserError
from ppo_repro.output import Parser, tell


def results_by_seed(cells: pd.DataFrame, by: str) -> pd.DataFrame:
    """One row per label of axis `by` and seed: cells, complete cells and fingerprints; UserError for another axis."""
    axes = [name.removeprefix("axis.") for name in cells.columns if name.startswith("axis.")]
    if by not in axes:
        raise UserError(f"--by {by}: is no axis of this grid; there are {', '.join(axes) or 'none'}")
    rows = []
    for (label, seed), group in cells.groupby([f"axis.{by}", "seed"], sort=False):
        complete = group[group["state"] == "complete"]
        fingerprints = complete["fingerprint"].nunique()
        rows.append({by: label, "seed": seed, "cells": len(group), "complete": len(complete), "results": fingerprints})
    return pd.DataFrame(rows)


@program
def main(argv: Sequence[str] | None) -> None:
    """Print the table; exit code 2 and one line on a user error."""
    parser = Parser(
        prog="python -m analysis.grids.distinct_results", description="how many different results one seed has"
    )
    parser.add_argument("grid", type=Path, help="folder of a grid")
    parser.add_argument("--by", required=True, help="the axis that may change a result, such as numerics.mode")
    arguments = parser.parse_args(argv)
    cells = cells_of(arguments.grid, ("seed", "state", "fingerprint"))
    tell(markdown(results_by_seed(cells, arguments.by)))


if __name__ == "__main__":
    sys.exit(main())
