"""How much of the variance over seeds is numerics? `python -m experiments.variance.answer [GRID]`; see
`experiments/answers.py`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from experiments.answers import TITLES, settings_figure, study
from ppo_repro.analysis.mean_text import mean_and_interval, with_interval


def numerics_part(values: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the share of the variance of [seeds, 2] between layouts of a seed, and its 95 % interval (low, high).

    share = 1 - ICC = 2 / (F + 1) with F = MS of seeds / MS of layouts within seeds; the interval scales F by quantiles
    of its distribution.
    """
    seeds = len(values)
    within = float((values.var(axis=1, ddof=1)).mean())
    if within == 0:
        return 0.0, 0.0, 0.0
    ratio = 2 * float(values.mean(axis=1).var(ddof=1)) / within
    low, high = stats.f.ppf([0.025, 0.975], seeds - 1, seeds)
    part, least, most = (min(1.0, 2 / (f + 1)) for f in (ratio, ratio / low, ratio / high))
    return part, least, most


def tables(results: pd.DataFrame) -> list[pd.DataFrame]:
    rows = []
    for mode in ("deterministic", "native"):
        usual, other = (
            results[results["setting"] == name].set_index("seed") for name in (mode, f"{mode}, other layout")
        )
        for measure, title in TITLES.items():
            values = np.stack([usual[measure], other[measure]], axis=1)
            row = {"numerics": mode, "measure": title, "mean": mean_and_interval(usual[measure])}
            row["other layout minus usual"] = mean_and_interval(other[measure] - usual[measure], "{:+.3f}")
            row["sd over seeds"] = f"{usual[measure].std():.3f}"
            row["sd over layouts of a seed"] = f"{np.sqrt(values.var(axis=1, ddof=1).mean()):.3f}"
            row["part of numerics"] = with_interval("{:.2f}", *numerics_part(values))
            row["same fingerprint, seeds"] = int((usual["fingerprint"] == other["fingerprint"]).sum())
            rows.append(row)
    return [pd.DataFrame(rows)]


if __name__ == "__main__":
    study(__file__, tables, settings_figure("setting", "mean_accuracy"))
