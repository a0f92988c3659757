"""Compare the settings of a grid over their seeds, from the frame of `grid_outcomes.outcomes`.

A setting is one combination of the axes' labels; a cell is a setting with a seed, which is one run.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd

from ppo_repro.analysis.grid_outcomes import MEASURES, Measure
from ppo_repro.analysis.mean_text import HALF_WIDTH, NOT_FINITE, mean_alone, mean_and_half_width
from ppo_repro.analysis.significance import Estimate, holm, one_sample, t_interval, t_test
from ppo_repro.base.errors import UserError
from ppo_repro.records.grid import axes_of
from ppo_repro.statistics.clusters import Floats


def measures_table(cells: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Return one row per setting: its numbers of seeds and fingerprints, and its measures as text."""
    axes = ", ".join(name.rpartition(".")[2] for name in axes_of(cells))
    table = []
    for point, group in cells.groupby("point", sort=False):
        others = (other for other in MEASURES.values() if other.name != measure)
        row = {
            axes: point,
            "seeds": len(group),
            f"{measure}, {HALF_WIDTH}": mean_and_half_width(group[measure], MEASURES[measure].form),
            **{other.name: _mean_of(other, group[other.name]) for other in others},
        }
        table.append({**row, "fingerprints": group["fingerprint"].nunique()})
    return pd.DataFrame(table)


def _mean_of(measure: Measure, values: pd.Series) -> str:
    has_none = measure.may_be_missing and bool(values.isna().all())
    return mean_alone(values, measure.form, "none" if has_none else NOT_FINITE)


def _require_same_seeds(cells: pd.DataFrame) -> None:
    seeds = cells.groupby("point", sort=False)["seed"].agg(frozenset)
    for point in seeds.index[seeds != seeds.iloc[0]]:
        raise UserError(f"{point} and {seeds.index[0]} have different seeds; finish the grid with `ppo-repro grid`")


class Comparison(NamedTuple):
    """A setting minus another one in a measure, paired by seed: a row of `comparisons`."""

    point: str
    difference: float  # mean
    ci_lo: float  # 95 % Student interval
    ci_hi: float
    p_value: float  # paired t-test
    p_holm: float  # Holm's correction over all settings


def comparisons(cells: pd.DataFrame, measure: str, against: str) -> pd.DataFrame:
    """Compare each setting with `against`, paired by seed, and return a `Comparison` per row.

    The numbers are NaN for a setting with a difference that is not finite. Raises UserError for an unknown setting, or
    if the settings have different seeds.
    """
    by_point = {str(point): group.set_index("seed")[measure] for point, group in cells.groupby("point", sort=False)}
    if against not in by_point:
        raise UserError(f"--against {against}: is not a setting of this grid; there are {'; '.join(by_point)}")
    _require_same_seeds(cells)
    others = [point for point in by_point if point != against]
    estimates = [_difference((by_point[point] - by_point[against]).to_numpy(np.float64)) for point in others]
    p_values = [t_test(estimate) for estimate in estimates]
    rows = [
        Comparison(point, estimate.mean, *t_interval(estimate, 0.95), p_value, p_holm)
        for point, estimate, p_value, p_holm in zip(others, estimates, p_values, holm(p_values), strict=True)
    ]
    # numbers also without a row, so that tables of several axes can be joined
    numbers = dict.fromkeys(Comparison._fields[1:], "float64")
    return pd.DataFrame(rows, columns=Comparison._fields).astype(numbers)


def _difference(apart: Floats) -> Estimate:
    return one_sample(apart) if np.isfinite(apart).all() else Estimate(math.nan, math.nan, math.nan)


def markdown(table: pd.DataFrame) -> str:
    """Return the table as Markdown."""
    lines = ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in table.itertuples(index=False))])
