"""Does a policy learn the same in precision high? `python -m experiments.precision.answer [GRID]`; see
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
    others = [setting for setting in results["numerics"].unique() if setting != "highest"]
    return [equality_table(results, "numerics", "highest", other) for other in others]


def figure(results: pd.DataFrame) -> Axes:
    return figures.settings(results.assign(point=results["numerics"]), "mean_accuracy")


if __name__ == "__main__":
    study(__file__, tables, figure)
