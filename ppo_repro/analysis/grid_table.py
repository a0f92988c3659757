"""What did a grid find? `ppo-repro analyse table GRID` prints three things, as Markdown.

A setting is one combination of the axes' labels; a cell is a setting with a seed, which is one run.

1. A row per setting: mean and 95 % Student interval over seeds of one measure (`--measure`, by default the accuracy),
   means of the other measures of `grid_outcomes.MEASURES`, and the number of fingerprints.
2. The differences of the measure from one setting (`--against`, by default the first), paired by seed, with Holm's
   correction.
3. The rank correlation of each clipped share and the measure, unless a setting lacks one of them or all are equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from ppo_repro.analysis.grid_outcomes import MEASURES, outcomes
from ppo_repro.analysis.significance import Estimate, holm, one_sample, t_interval, t_test, with_interval
from ppo_repro.base.errors import UserError
from ppo_repro.base.output import Parser, tell
from ppo_repro.records.grid import axes_of

DRAWS = 2000
SPREAD = "mean ± half of the 95 % Student interval"


def with_half_width(values: pd.Series, form: str = "{:.3f}") -> str:
    """Return mean and half width of the 95 % Student interval as text; only the mean if the values do not vary.

    Values that are not finite are counted and left out.
    """
    finite = values[np.isfinite(values)]
    if finite.empty:
        return "not finite"
    estimate = one_sample(finite.to_numpy(np.float64))
    half = t_interval(estimate, 0.95)[1] - estimate.mean
    text = form.format(estimate.mean) + ("" if math.isnan(half) else f" ± {form.format(half)}")
    return text if len(finite) == len(values) else f"{text} ({len(values) - len(finite)} not finite)"


def rows(cells: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Return one row per setting: its numbers of seeds and fingerprints, and its measures as text."""
    axes = ", ".join(name.rpartition(".")[2] for name in axes_of(cells))
    table = []
    for point, group in cells.groupby("point", sort=False):
        means = {name: group[name].mean() for name in MEASURES if name != measure}
        row = {
            axes: point,
            "seeds": len(group),
            f"{measure}, {SPREAD}": with_half_width(group[measure], MEASURES[measure].form),
            **{name: "" if math.isnan(mean) else MEASURES[name].form.format(mean) for name, mean in means.items()},
        }
        table.append({**row, "fingerprints": group["fingerprint"].nunique()})
    return pd.DataFrame(table)


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


class Correlation(NamedTuple):
    """Spearman's rank correlation, and its 95 % bootstrap interval [low, high]."""

    value: float
    low: float
    high: float


def rank_correlation(cells: pd.DataFrame, share: str, measure: str) -> Correlation:
    """Return Spearman's correlation of two columns of `outcomes`, averaged over seeds, and its 95 % bootstrap interval.

    The bootstrap draws all settings of a seed together, because they start from the same policy. NaN if all shares or
    all measures are equal. Raises UserError if the settings have different seeds.
    """
    _require_same_seeds(cells)
    rng = np.random.default_rng(0)
    by_seed = [cells[cells["seed"] == seed].set_index("point")[[share, measure]] for seed in cells["seed"].unique()]

    def correlation(seeds: Sequence[pd.DataFrame]) -> float:
        means = np.sum([values.to_numpy(np.float64) for values in seeds], axis=0) / len(seeds)
        if np.ptp(means[:, 0]) == 0 or np.ptp(means[:, 1]) == 0:
            return math.nan
        return float(spearmanr(means[:, 0], means[:, 1]).statistic)

    draws = [correlation([by_seed[i] for i in rng.integers(0, len(by_seed), len(by_seed))]) for _ in range(DRAWS)]
    low, high = np.nanquantile(draws, [0.025, 0.975]) if not np.isnan(draws).all() else (math.nan, math.nan)
    return Correlation(correlation(by_seed), float(low), float(high))


def markdown(table: pd.DataFrame) -> str:
    """Return the table as Markdown."""
    lines = ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in table.itertuples(index=False))])


def report(cells: pd.DataFrame, measure: str, against: str) -> str:
    """Return the printed tables as Markdown."""
    compared, signed = comparisons(cells, measure, against), MEASURES[measure].form.replace(":", ":+")
    paragraphs = [markdown(rows(cells, measure))]
    if len(compared):
        differences = pd.DataFrame(
            {
                "setting": compared["point"],
                f"{measure} minus {measure} of {against}, 95 % interval": [
                    with_interval(signed, *numbers) for numbers in compared[["difference", "ci_lo", "ci_hi"]].to_numpy()
                ],
                "p, paired t-test": _texts_of_p(compared["p_value"]),
                "p, Holm": _texts_of_p(compared["p_holm"]),
            }
        )
        paragraphs.append(markdown(differences))
    if len(compared) > 1 and cells["outside"].any():
        for share in ("removed", "outside"):
            rank = rank_correlation(cells, share, measure)
            if math.isnan(rank.value):
                continue
            runs = spearmanr(cells[share], cells[measure]).statistic
            paragraphs.append(
                f"rank correlation of share {share} and {measure}: {rank.value:.2f} over {len(compared) + 1} settings "
                f"(bootstrap of seeds, 95 % [{rank.low:.2f}, {rank.high:.2f}]), {runs:.2f} over {len(cells)} runs"
            )
    return "\n\n".join(paragraphs)


def _texts_of_p(values: pd.Series) -> list[str]:
    return ["" if math.isnan(p) else f"{p:.4f}" for p in values]


def main(argv: Sequence[str]) -> None:
    """Print the report."""
    parser = Parser(prog="ppo-repro analyse table", description="table of a grid over seeds")
    parser.add_argument("grid", type=Path, help="folder of a grid")
    parser.add_argument("--measure", choices=MEASURES, default="accuracy", help="what is compared")
    parser.add_argument("--against", help="the setting that every setting is compared with: its labels joined by ', '")
    arguments = parser.parse_args(argv)
    cells = outcomes(arguments.grid)
    tell(report(cells, arguments.measure, arguments.against or str(cells["point"].iloc[0])))
