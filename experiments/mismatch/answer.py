"""What does a real mismatch cost? `python -m experiments.mismatch.answer [GRID]`; see `experiments/answers.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from analysis import figures
from analysis.program import program
from experiments.answers import differences, interval, study

MEASURE = "mean_accuracy"  # over all evaluations: one accuracy at the end varies more between seeds
EXACT = "float32, sampler as anchor"


if TYPE_CHECKING:
    from matplotlib.axes import Axes


def tables(results: pd.DataFrame) -> list[pd.DataFrame]:
    made = []
    for rate, group in results.groupby("learning rate", sort=False):
        against = differences(group, group["case"], MEASURE, EXACT).set_index("point")
        rows = []
        for point, cells in group.groupby("case", sort=False):
            row = {f"sampler, remedy; learning rate {rate}": point, "k3, nats a token": f"{cells['k3'].mean():.1e}"}
            row["accuracy, mean over training"] = interval(cells[MEASURE])
            row |= {"minus float32": against["difference"].get(point, ""), "p, Holm": against["p"].get(point, "")}
            row["at the end"] = f"{cells['accuracy'].mean():.3f}"
            rows.append(row)
        made.append(pd.DataFrame(rows))
    return made


def figure(results: pd.DataFrame) -> Axes:
    usual = results[results["learning rate"] == "usual"]  # the doubled one is in the tables
    return figures.differences(usual.assign(point=usual["case"]), MEASURE, EXACT)


@program
def main(argv: Sequence[str] | None) -> None:
    """Print the tables; exit code 2 and one line on a user error."""
    study(Path(__file__).parent, tables, figure, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
