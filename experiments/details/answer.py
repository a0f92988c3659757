"""Which implementation detail matters? `python -m experiments.details.answer [GRID]`; see
`experiments/answers.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from experiments.answers import LAST, outcome, settings_table, study
from ppo_repro.analysis import figures
from ppo_repro.records import reader

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURE, USUAL = "mean_accuracy", "usual"


def measures(run_dir: Path, _: Path | None) -> dict[str, float]:
    """Return the outcome, and the explained variance of the last iterations."""
    explained = reader.read_iterations(run_dir, columns=["explained_variance"]).tail(LAST)
    return outcome(run_dir) | {"explained": float(explained["explained_variance"].mean())}


def tables(results: pd.DataFrame) -> list[pd.DataFrame]:
    columns: dict[str, tuple[str, str | None]] = {
        "at the end": ("accuracy", None),
        "KL, nats a response": ("KL", "{:.2f}"),
        "entropy, nats a token": ("entropy", "{:.3f}"),
        "explained variance at the end": ("explained", "{:.2f}"),
    }
    return [settings_table(results, "detail", MEASURE, "accuracy, mean over training", USUAL, columns)]


def figure(results: pd.DataFrame) -> Axes:
    return figures.settings(results.assign(point=results["detail"]), MEASURE)


if __name__ == "__main__":
    study(__file__, tables, figure, measures)
