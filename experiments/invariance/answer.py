"""Do deterministic numerics change learning? `python -m experiments.invariance.answer [GRID]`; see
`experiments/answers.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from experiments.answers import interval, study
from ppo_repro.analysis import figures
from ppo_repro.analysis.stats.significance import detectable, one_sample, t_interval, tost

MEASURES = {"mean_accuracy": "accuracy, mean over training", "accuracy": "accuracy at the end", "score": "score"}
MARGIN = 0.05  # a smaller difference counts as none
SAME, OTHER = "deterministic", "native"


if TYPE_CHECKING:
    from matplotlib.axes import Axes


def tables(results: pd.DataFrame) -> list[pd.DataFrame]:
    rows = []
    for measure, title in MEASURES.items():
        values = {mode: cells.set_index("seed")[measure] for mode, cells in results.groupby("numerics")}
        apart = (values[OTHER] - values[SAME]).to_numpy(np.float64)
        estimate = one_sample(apart)
        low, high = t_interval(estimate, 0.95)
        smallest = detectable(float(apart.std(ddof=1)), len(apart), paired=True, alpha=0.05)
        rows.append(
            {
                "measure": title,
                **{mode: interval(values[mode]) for mode in (SAME, OTHER)},
                "native minus deterministic": f"{estimate.mean:+.3f} [{low:+.3f}, {high:+.3f}]",
                f"p of at least {MARGIN:g} apart": f"{tost(estimate, MARGIN):.3f}",
                "smallest effect found with power 0.8": f"{smallest:.3f}",
                "sd over seeds": f"{values[SAME].std():.3f}",
                "sd of the difference": f"{apart.std(ddof=1):.3f}",
            }
        )
    return [pd.DataFrame(rows)]


def figure(results: pd.DataFrame) -> Axes:
    return figures.settings(results.assign(point=results["numerics"]), "mean_accuracy")


if __name__ == "__main__":
    study(__file__, tables, figure)
