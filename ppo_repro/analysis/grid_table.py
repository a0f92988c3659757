"""Compare the settings of a grid over their seeds, from the frame of `grid_outcomes.outcomes`.

A setting is one combination of the axes' labels; a cell is a setting with a seed, which is one run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from ppo_repro.analysis.grid_outcomes import MEASURES, ClipShares, Measure
from ppo_repro.analysis.significance import Estimate, finite_of, holm, one_sample, t_interval, t_test
from ppo_repro.base.errors import UserError
from ppo_repro.records.grid import axes_of
from ppo_repro.statistics.clusters import Floats

DRAWS = 2000
MIN_RANKED = 3  # settings; two have no order but up or down
SPREAD = "mean ± half of the 95 % Student interval"


def with_half_width(values: pd.Series, form: str = "{:.3f}") -> str:
    """Return mean and half width of the 95 % Student interval as text; only the mean if the values do not vary.

    Values that are not finite are counted and left out.
    """
    finite, others = finite_of(values)
    if not len(finite):
        return "not finite"
    estimate = one_sample(finite)
    half = t_interval(estimate, 0.95)[1] - estimate.mean
    return form.format(estimate.mean) + ("" if math.isnan(half) else f" ± {form.format(half)}") + others


def mean_text(values: pd.Series, form: str, nothing: str = "not finite") -> str:
    """Return the mean as text, or `nothing`. Values that are not finite are counted and left out."""
    finite, others = finite_of(values)
    return form.format(finite.mean()) + others if len(finite) else nothing


def measures_table(cells: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Return one row per setting: its numbers of seeds and fingerprints, and its measures as text."""
    axes = ", ".join(name.rpartition(".")[2] for name in axes_of(cells))
    table = []
    for point, group in cells.groupby("point", sort=False):
        others = (other for other in MEASURES.values() if other.name != measure)
        row = {
            axes: point,
            "seeds": len(group),
            f"{measure}, {SPREAD}": with_half_width(group[measure], MEASURES[measure].form),
            **{other.name: _mean_of(other, group[other.name]) for other in others},
        }
        table.append({**row, "fingerprints": group["fingerprint"].nunique()})
    return pd.DataFrame(table)


def _mean_of(measure: Measure, values: pd.Series) -> str:
    has_none = measure.may_be_missing and bool(values.isna().all())
    return mean_text(values, measure.form, "none" if has_none else "not finite")


def _require_same_seeds(cells: pd.DataFrame) -> None:
    seeds = cells.groupby("point", sort=False)["seed"].agg(frozenset)
    for point in seeds.index[seeds != seeds.iloc[0]]:
        raise UserError(f"{point} and {seeds.index[0]} have different seeds; finish the grid with `ppo-repro grid`")


def comparisons(cells: pd.DataFrame, measure: str, against: str) -> pd.DataFrame:
    """Compare each setting with `against`, paired by seed.

    Columns: point, difference (mean), ci_lo and ci_hi (95 % Student interval), p_value (paired t-test), p_holm (Holm's
    correction over all settings). The numbers are NaN for a setting with a difference that is not finite. Raises
    UserError for an unknown setting, or if the settings have different seeds.
    """
    by_point = {str(point): group.set_index("seed")[measure] for point, group in cells.groupby("point", sort=False)}
    if against not in by_point:
        raise UserError(f"--against {against}: is not a setting of this grid; there are {'; '.join(by_point)}")
    _require_same_seeds(cells)
    compared = []
    for point, values in by_point.items():
        if point == against:
            continue
        apart = (values - by_point[against]).to_numpy(np.float64)
        estimate = one_sample(apart) if np.isfinite(apart).all() else Estimate(math.nan, math.nan, math.nan)
        low, high = t_interval(estimate, 0.95)
        numbers = {"difference": estimate.mean, "ci_lo": low, "ci_hi": high, "p_value": t_test(estimate)}
        compared.append({"point": point, **numbers})
    table = pd.DataFrame(compared)
    table["p_holm"] = holm(table["p_value"].tolist()) if len(table) else []
    return table


class RankCorrelation(NamedTuple):
    """Spearman's correlation over settings, with its 95 % bootstrap interval [low, high], and over single runs."""

    value: float
    low: float
    high: float
    over_runs: float


def rank_correlation(cells: pd.DataFrame, share: str, measure: str) -> RankCorrelation:
    """Return the rank correlation of two columns of `outcomes`: of the settings' means over seeds, and of the runs.

    The bootstrap draws all settings of a seed together, because they start from the same policy. NaN if all shares or
    all measures are equal, or if a number is not finite. Raises UserError if the settings have different seeds.
    """
    _require_same_seeds(cells)
    if not np.isfinite(cells[[share, measure]].to_numpy(np.float64)).all():
        return RankCorrelation(math.nan, math.nan, math.nan, math.nan)
    rng, points = np.random.default_rng(0), cells["point"].unique()
    by_seed = [
        rows.set_index("point").loc[points, [share, measure]].to_numpy(np.float64)
        for _, rows in cells.groupby("seed", sort=False)
    ]

    def of_means(chosen: Sequence[Floats]) -> float:
        return _spearman(np.sum(chosen, axis=0) / len(chosen))

    draws = [of_means([by_seed[i] for i in rng.integers(0, len(by_seed), len(by_seed))]) for _ in range(DRAWS)]
    low, high = np.nanquantile(draws, [0.025, 0.975]) if not np.isnan(draws).all() else (math.nan, math.nan)
    over_runs = _spearman(cells[[share, measure]].to_numpy(np.float64))
    return RankCorrelation(of_means(by_seed), float(low), float(high), over_runs)


def _spearman(pairs: Floats) -> float:
    """Return Spearman's correlation of two columns, NaN if one has equal values only."""
    x, y = pairs.T
    return math.nan if np.ptp(x) == 0 or np.ptp(y) == 0 else float(spearmanr(x, y).statistic)


def rank_correlations(cells: pd.DataFrame, measure: str) -> dict[str, RankCorrelation]:
    """Return `rank_correlation` of each clipped share that has one with the measure; {} for few settings."""
    if cells["point"].nunique() < MIN_RANKED or not cells["outside_fraction"].any():
        return {}
    ranks = {share: rank_correlation(cells, share, measure) for share in ClipShares._fields}
    return {share: rank for share, rank in ranks.items() if not math.isnan(rank.value)}


def markdown(table: pd.DataFrame) -> str:
    """Return the table as Markdown."""
    lines = ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in table.itertuples(index=False))])
