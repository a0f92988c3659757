"""How are ratios distributed: a histogram that can be added up over runs, and how far outside the band they lie."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.clipping.flags import ratios_of
from analysis.clipping.step import overshoot
from analysis.clipping.update_rows import Float64, IterationRows, column, policy_rows, steps_of

MAGNITUDES = np.array([0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0])
SURVIVAL = np.array([0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0])
_SIDE = len(MAGNITUDES)  # bins on each side of zero, including the open one


def histogram_bins() -> pd.DataFrame:
    """The fixed bins of the log-ratio, in order; the last row counts NaN.

    (-inf, -5), ..., [-0.005, 0), exactly 0, (0, 0.005], ..., (5, inf). A bin includes its edge farther from zero.
    """
    far = np.append(MAGNITUDES[1:], np.inf)
    lower = np.concatenate([-far[::-1], [0.0], MAGNITUDES, [np.nan]])
    upper = np.concatenate([-MAGNITUDES[::-1], [0.0], far, [np.nan]])
    return pd.DataFrame({"bin_lo": lower, "bin_hi": upper})


def histogram_index(log_ratios: Float64) -> npt.NDArray[np.int64]:
    """The row of `histogram_bins` of each log-ratio."""
    size = np.searchsorted(MAGNITUDES, np.abs(log_ratios), side="left")
    index = _SIDE + np.sign(np.nan_to_num(log_ratios)) * size
    return np.where(np.isnan(log_ratios), 2 * _SIDE + 1, index).astype(np.int64)


def ratio_hist(item: IterationRows) -> pd.DataFrame:
    """Counts (int64) of the log-ratio per step and sign of the advantage; they add up over steps and runs."""
    rows, bins = policy_rows(item), histogram_bins()
    signs = np.sign(column(rows, "advantages"))
    bin_of = histogram_index(column(rows, "log_ratios"))
    tables = []
    for (epoch, minibatch), step_rows in steps_of(rows).items():
        for sign in (-1, 0, 1):
            selected = step_rows[signs[step_rows] == sign]
            key = pd.DataFrame({"iteration": item.iteration, "epoch": epoch, "minibatch": minibatch, "adv_sign": sign},
                               index=bins.index)  # fmt: skip
            count = np.bincount(bin_of[selected], minlength=len(bins)).astype(np.int64)
            tables.append(pd.concat([key, bins], axis=1).assign(count=count))
    return pd.concat(tables, ignore_index=True)


def overshoot_survival(item: IterationRows) -> pd.DataFrame:
    """Per epoch, how many tokens lie more than `beyond` outside the band; counts, so that iterations can be added."""
    rows = policy_rows(item)
    over = overshoot(ratios_of(column(rows, "log_ratios")), item.rule)
    tables = []
    for epoch, epoch_rows in rows.groupby("epoch", sort=True).indices.items():
        counts = (over[epoch_rows][:, None] > SURVIVAL[None, :]).sum(axis=0)
        key = {"iteration": item.iteration, "epoch": epoch, "beyond": SURVIVAL}
        tables.append(pd.DataFrame({**key, "n_tok": len(epoch_rows), "count": counts.astype(np.int64)}))
    return pd.concat(tables, ignore_index=True)
