"""What does a real mismatch cost? `python -m experiments.mismatch.answer [GRID]`; see `experiments/answers.py`."""

from __future__ import annotations

import pandas as pd

from experiments.answers import TITLES, Columns, settings_figure, settings_table, study

MEASURE = "mean_accuracy"  # over all evaluations: one accuracy at the end varies more between seeds
USUAL, DOUBLED = "usual", "doubled learning rate"


def tables(results: pd.DataFrame) -> list[pd.DataFrame]:
    columns: Columns = {
        "at the end": ("eval_accuracy", None),
        "k3, nats a token": ("k3", "{:.1e}"),
    }
    doubled = results["sampler"].str.startswith(DOUBLED)
    return [
        settings_table(results[~doubled], "sampler", MEASURE, TITLES[MEASURE], USUAL, columns),
        settings_table(results[doubled], "sampler", MEASURE, TITLES[MEASURE], DOUBLED, columns),
    ]


if __name__ == "__main__":
    study(__file__, tables, settings_figure("sampler", MEASURE))
