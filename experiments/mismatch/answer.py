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
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def tables(results: pd.DataFrame) -> list[pd.DataFrame]:
    made = []
    for rate, group in results.groupby("learning rate", sort=False):
        points = group["sampler"] + ", " + group["remedy"]
        against = differences(group, points, MEASURE, "float32, none").set_index("point")
        rows = []
        for point, cells in group.groupby(points, sort=False):
            row = {f"sampler, remedy at {rate}": point, "k3, nats a token": f"{cells['k3'].mean():.1e}"}
            row["accuracy, mean over training"] = interval(cells[MEASURE])
            row["minus float32"] = against["difference"].get(point, "")
            row["p, Holm"] = against["p"].get(point, "")
            row["at the end"] = f"{cells['accuracy'].mean():.3f}"
            rows.append(row)
        made.append(pd.DataFrame(rows))
    return made


def figure(results: pd.DataFrame) -> str:
    rates = list(dict.fromkeys(results["learning rate"]))
    drawn, axes = new_figure(4.5 * len(rates), 3.6, len(rates))
    remedies, samplers = list(dict.fromkeys(results["remedy"])), list(dict.fromkeys(results["sampler"]))
    for rate, axis in zip(rates, axes, strict=True):
        cells = results[results["learning rate"] == rate].set_index("seed")
        base = cells[(cells["sampler"] == "float32") & (cells["remedy"] == "none")][MEASURE]
        for number, (remedy, color) in enumerate(zip(remedies, COLORS, strict=False)):
            for position, sampler in enumerate(samplers):
                found = cells[(cells["sampler"] == sampler) & (cells["remedy"] == remedy)][MEASURE]
                if sampler == "float32" or found.empty:
                    continue
                estimate = one_sample((found - base).to_numpy(np.float64))
                x = position + 0.13 * (number - len(remedies) / 2)
                axis.plot((x, x), t_interval(estimate, 0.95), color=color, linewidth=2)
                label = remedy if position == len(samplers) - 1 else None
                axis.plot([x], [estimate.mean], "o", color=color, label=label)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_xticks(range(1, len(samplers)), samplers[1:])
        axis.set_title(f"learning rate {rate}")
    axes[0].set_ylabel("accuracy minus that without a mismatch")
    axes[0].legend(fontsize=8)
    return svg(drawn)


@program
def main(argv: Sequence[str] | None) -> None:
    """Print the tables; exit code 2 and one line on a user error."""
    study(Path(__file__).parent, tables, figure, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
