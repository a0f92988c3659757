"""Compare the settings of a grid over their seeds, from the frame of `grid_outcomes.outcomes`.

A setting is one combination of the axes' labels; a cell is a setting with a seed, which is one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
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
    """A setting minus another one in a measure, paired by seed; NaN if a difference is not finite."""

    point: str
    difference: float  # mean
    ci_lo: float  # 95 % Student interval
    ci_hi: float
    p_value: float  # paired t-test
    p_holm: float  # Holm's correction over all settings


def comparisons(cells: pd.DataFrame, measure: str, against: str) -> pd.DataFrame:
    """Compare each setting with `against`, paired by seed, and return a `Comparison` per row.

    Raises UserError for an unknown setting, or if the settings have different seeds.
    """
    return pd.DataFrame(compared(paired_differences(cells, measure, against).items()), columns=Comparison._fields)


def paired_differences(cells: pd.DataFrame, measure: str, against: str) -> dict[str, pd.Series]:
    """Return the differences of each other setting from `against`, by seed. Raises UserError as `comparisons` does."""
    by_point = {str(point): group.set_index("seed")[measure] for point, group in cells.groupby("point", sort=False)}
    if against not in by_point:
        raise UserError(f"--against {against}: is not a setting of this grid; there are {'; '.join(by_point)}")
    _require_same_seeds(cells)
    return {point: values - by_point[against] for point, values in by_point.items() if point != against}


def compared(differences: Iterable[tuple[str, pd.Series]]) -> list[Comparison]:
    """Test the `paired_differences` of each setting."""
    means = [(point, _estimate(by_seed.to_numpy(np.float64))) for point, by_seed in differences]
    p_values = [t_test(mean) for _, mean in means]
    return [
        Comparison(point, mean.mean, *t_interval(mean, 0.95), p_value, float(p_holm))
        for (point, mean), p_value, p_holm in zip(means, p_values, holm(p_values), strict=True)
    ]


def _estimate(differences: Floats) -> Estimate:
    return one_sample(differences) if np.isfinite(differences).all() else Estimate(math.nan, math.nan, math.nan)


def markdown(table: pd.DataFrame) -> str:
    """Return the table as Markdown."""
    lines = ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in table.itertuples(index=False))])
