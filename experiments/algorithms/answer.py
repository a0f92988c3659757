"""Which algorithm at equal sampled tokens? `python -m experiments.algorithms.answer [GRID]`; see
`experiments/answers.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from analysis import figures
from analysis.program import program
from experiments.answers import differences, interval, study

MEASURE = "mean_accuracy"


if TYPE_CHECKING:
    from matplotlib.axes import Axes


def tables(results: pd.DataFrame) -> list[pd.DataFrame]:
    points = results["algorithm"]
    against = differences(results, points, MEASURE, "PPO").set_index("point")
    rows = []
    for point, cells in results.groupby("algorithm", sort=False):
        rows.append(
            {
                "algorithm": point,
                "accuracy, mean over training": interval(cells[MEASURE]),
                "minus PPO": against["difference"].get(point, ""),
                "p, Holm": against["p"].get(point, ""),
                "at the end": interval(cells["accuracy"]),
                "KL, nats a response": f"{cells['KL'].mean():.2f}",
                "entropy, nats a token": f"{cells['entropy'].mean():.3f}",
                "length, tokens": f"{cells['length'].mean():.1f}",
                "sampled tokens": f"{cells['tokens'].mean():,.0f}",
            }
        )
    return [pd.DataFrame(rows)]


def figure(results: pd.DataFrame) -> Axes:
    return figures.settings(results.assign(point=results["algorithm"]), MEASURE)


@program
def main(argv: Sequence[str] | None) -> None:
    """Print the tables; exit code 2 and one line on a user error."""
    study(Path(__file__).parent, tables, figure, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
