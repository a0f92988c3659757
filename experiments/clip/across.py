"""Does the share of clipped visits say how accurate a setting is? A figure over settings, and their rank correlation.

`results` is the frame of `results.csv`, one row per run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from ppo_repro.analysis import figures
from ppo_repro.analysis.grid_outcomes import MEASURES
from ppo_repro.statistics.clusters import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BOOTSTRAP_DRAWS = 2000
GOOD = (0.1, 0.4)  # shares of clipped tokens that rules of thumb recommend
SHADE = "#00835f"


class RankCorrelation(NamedTuple):
    """Spearman's correlation over the settings' means, with its 95 % bootstrap interval [low, high]."""

    value: float
    low: float
    high: float


def rank_correlation(results: pd.DataFrame, share: str, measure: str) -> RankCorrelation:
    """Return the rank correlation of two columns, NaN if one has equal means only; all settings have the same seeds.

    The bootstrap draws all settings of a seed together, because they start from the same policy.
    """
    rng, settings = np.random.default_rng(0), results["setting"].unique()
    by_seed = [
        rows.set_index("setting").loc[settings, [share, measure]].to_numpy(np.float64)
        for _, rows in results.groupby("seed", sort=False)
    ]

    def of_means(chosen: Sequence[Floats]) -> float:
        x, y = (np.sum(chosen, axis=0) / len(chosen)).T
        return float("nan") if np.ptp(x) == 0 or np.ptp(y) == 0 else float(spearmanr(x, y).statistic)

    draws = [
        of_means([by_seed[i] for i in rng.integers(0, len(by_seed), len(by_seed))]) for _ in range(BOOTSTRAP_DRAWS)
    ]
    low, high = np.nanquantile(draws, [0.025, 0.975])
    return RankCorrelation(of_means(by_seed), float(low), float(high))


def across_figure(results: pd.DataFrame, share: str, measure: str) -> Axes:
    """Draw `measure` over `share`: a dot per run, a bar and the name at the mean of a setting, and GOOD as a band."""
    axes = figures.new_axes(8.0, 4.2)[0]
    axes.axvspan(*GOOD, color=SHADE, alpha=0.12)
    axes.plot(results[share], results[measure], "o", color=figures.RUN, alpha=0.55, markersize=5)
    for setting, rows in results.groupby("setting", sort=False):
        x, y = rows[[share, measure]].mean()
        axes.plot([x], [y], "_", color=figures.MEAN, markersize=11, markeredgewidth=2.5)
        axes.annotate(str(setting), (x, y), xytext=(7, -3), textcoords="offset points")
    rank = rank_correlation(results, share, measure)
    title = f"rank correlation {rank.value:.2f} [{rank.low:.2f}, {rank.high:.2f}]"
    axes.set(title=title, xlabel=MEASURES[share].meaning, ylabel=measure)
    return axes
