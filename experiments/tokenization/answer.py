"""What do tokenizer and unit of the KL change? `python -m experiments.tokenization.answer [GRID]`; see
`experiments/answers.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from experiments.answers import Columns, outcome, settings_table, study
from ppo_repro.analysis import figures
from ppo_repro.analysis.tokenization.recorded_tokenizer import recorded_tokenizer
from ppo_repro.analysis.tokenization.tables import drift_by_iteration
from ppo_repro.records import reader

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURE, USUAL = "ref_kl_per_sequence", "characters, per response"


def measures(run_dir: Path) -> dict[str, float]:
    """Return the outcome, KL per token, and the share of the last iteration's responses that encode to other ids."""
    found, last = outcome(run_dir), len(reader.read_iterations(run_dir)) - 1
    drift = drift_by_iteration(run_dir, recorded_tokenizer(run_dir), iterations=[last])
    return found | {
        "KL_token": found[MEASURE] / found["response_length_mean"],
        "drift": float(drift["frac_drifted"].iloc[0]),
    }


def settings(results: pd.DataFrame) -> pd.DataFrame:
    """Return the results with a column that joins the two labels to one setting."""
    return results.assign(setting=results["tokenizer"] + ", " + results["KL charged"])


def tables(results: pd.DataFrame) -> list[pd.DataFrame]:
    columns: Columns = {
        "KL, nats a token": ("KL_token", "{:.3f}"),
        "length, tokens": ("response_length_mean", "{:.1f}"),
        "accuracy": ("eval_accuracy", None),
        "responses with other ids": ("drift", "{:.1%}"),
    }
    return [settings_table(settings(results), "setting", MEASURE, "KL, nats a response", USUAL, columns)]


def figure(results: pd.DataFrame) -> Axes:
    return figures.settings_figure(results.assign(point=settings(results)["setting"]), MEASURE)


if __name__ == "__main__":
    study(__file__, tables, figure, measures)
