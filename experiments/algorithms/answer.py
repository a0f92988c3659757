"""Which algorithm at equal sampled tokens? `python -m experiments.algorithms.answer [GRID]`; see
`experiments/answers.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from experiments.answers import settings_table, study
from ppo_repro.analysis import figures

MEASURE = "mean_accuracy"

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def tables(results: pd.DataFrame) -> list[pd.DataFrame]:
    columns: dict[str, tuple[str, str | None]] = {
        "at the end": ("accuracy", None),
        "KL, nats a response": ("KL", "{:.2f}"),
        "entropy, nats a token": ("entropy", "{:.3f}"),
        "length, tokens": ("length", "{:.1f}"),
        "sampled tokens": ("tokens", "{:,.0f}"),
    }
    return [settings_table(results, "algorithm", MEASURE, "accuracy, mean over training", "PPO", columns)]


def figure(results: pd.DataFrame) -> Axes:
    return figures.settings(results.assign(point=results["algorithm"]), MEASURE)


if __name__ == "__main__":
    study(__file__, tables, figure)
