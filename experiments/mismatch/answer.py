"""What does a real mismatch cost? `python -m experiments.mismatch.answer [GRID]`; see `experiments/answers.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from experiments.answers import settings_table, study
from ppo_repro.analysis import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURE = "mean_accuracy"  # over all evaluations: one accuracy at the end varies more between seeds
USUAL, DOUBLED = "usual", "doubled learning rate"


def tables(results: pd.DataFrame) -> list[pd.DataFrame]:
    columns: dict[str, tuple[str, str | None]] = {
        "at the end": ("accuracy", None),
        "k3, nats a token": ("k3", "{:.1e}"),
    }
    doubled = results["sampler"].str.startswith(DOUBLED)
    title = "accuracy, mean over training"
    return [
        settings_table(results[~doubled], "sampler", MEASURE, title, USUAL, columns),
        settings_table(results[doubled], "sampler", MEASURE, title, DOUBLED, columns),
    ]


def figure(results: pd.DataFrame) -> Axes:
    return figures.settings(results.assign(point=results["sampler"]), MEASURE)


if __name__ == "__main__":
    study(__file__, tables, figure)
