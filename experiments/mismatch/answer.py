"""What does a real mismatch cost? `python -m experiments.mismatch.answer [GRID]`; see `experiments/answers.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.grids.figure import new_figure, svg
from analysis.program import program
from analysis.stats.significance import one_sample, t_interval
from experiments.answers import differences, interval, study

MEASURE = "mean_accuracy"  # over all evaluations: one accuracy at the end varies more between seeds
EXACT = "float32, sampler as anchor"


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


def figure(results: pd.DataFrame) -> str:
    rates, cases = (list(dict.fromkeys(results[name])) for name in ("learning rate", "case"))
    drawn, axes = new_figure(10.0, 4.2, len(rates))
    for rate, axis in zip(rates, axes, strict=True):
        values = results[results["learning rate"] == rate].pivot(index="seed", columns="case", values=MEASURE)
        for row, case in enumerate(cases[1:]):
            apart = (values[case] - values[EXACT]).to_numpy(np.float64)
            axis.plot(apart, np.full(len(apart), row), "o", color="#0072b2", alpha=0.5)
            estimate = one_sample(apart)
            axis.plot(t_interval(estimate, 0.95), (row, row), color="#d55e00", linewidth=2)
            axis.plot([estimate.mean], [row], "|", color="#d55e00", markersize=11, markeredgewidth=2.5)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_yticks(range(len(cases) - 1), cases[1:] if axis is axes[0] else [""] * (len(cases) - 1))
        axis.invert_yaxis()
        axis.set_title(f"learning rate {rate}")
        axis.set_xlabel("accuracy minus that without a mismatch")
    return svg(drawn)


@program
def main(argv: Sequence[str] | None) -> None:
    """Print the tables; exit code 2 and one line on a user error."""
    study(Path(__file__).parent, tables, figure, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
