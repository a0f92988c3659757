"""Do deterministic numerics change learning? `python -m experiments.invariance.answer [GRID]`; see
`experiments/answers.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from experiments.answers import equality_table, study
from ppo_repro.analysis import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def tables(results: pd.DataFrame) -> list[pd.DataFrame]:
    return [equality_table(results, "numerics", "deterministic", "native")]


def figure(results: pd.DataFrame) -> Axes:
    return figures.settings(results.assign(point=results["numerics"]), "mean_accuracy")


if __name__ == "__main__":
    study(__file__, tables, figure)
