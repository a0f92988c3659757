"""Two groups of seeds of a grid: does a setting change the outcome?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from analysis.compare.rows import Row, run_compare
from analysis.stats.power import minimum_detectable_effect, null_rejection_rate, split_rejection_rate
from analysis.stats.resampling import iqm_difference, mean_difference, probability_of_improvement, stratified_bootstrap
from analysis.stats.significance import DRAWS, Floats, one_sample, sign_flip, t_interval, t_test, tost, welch
from ppo_repro.errors import UserError

Pairing = Literal["seed", "none"]


@dataclass(frozen=True)
class Groups:
    """The values of two groups: one array per stratum (setting of the other axes), seeds in ascending order."""

    a: list[Floats]
    b: list[Floats]


def compare_groups(
    frame: pd.DataFrame,
    axis: str,
    a: str,
    b: str,
    metric: str | Sequence[str],
    rng: np.random.Generator,
    *,
    pairing: Pairing = "seed",
    margin: float | None = None,
    alpha: float = 0.05,
    draws: int = DRAWS,
) -> pd.DataFrame:
    """`run_compare` rows at level outcome: the cells with axis = b against those with axis = a; differences are b - a.

    frame: a grid's cells.parquet, or its results.parquet, averaged over the iterations of each cell. Units are seeds:
    differences are averaged over the settings of the other axes first. pairing "seed": sign changes of the
    differences of equal seeds, Student's interval; "none": Welch's t. For each metric also the difference of
    interquartile means and the probability of improvement with bootstrap intervals over seeds, the smallest detectable
    effect, and the rates of false positives of this test and of one between random halves of the seeds of a.
    `margin`: also TOST. Holm's correction is over the metrics.

    Raises UserError on unknown axes, labels and metrics, missing or incomplete cells, and values that are not finite.
    """
    if not 0 < alpha < 1:
        raise UserError(f"alpha = {alpha}: must be between 0 and 1")
    if margin is not None and not margin > 0:
        raise UserError(f"margin = {margin}: must be positive, in the unit of the metric")
    metrics = [metric] if isinstance(metric, str) else list(metric)
    rows = []
    for name in metrics:
        groups = groups_of(frame, axis, a, b, name, pairing)
        rows += outcome_rows(groups, name, rng, pairing=pairing, margin=margin, alpha=alpha, draws=draws)
    return run_compare(f"{axis}={a}", f"{axis}={b}", rows, alpha)


def groups_of(frame: pd.DataFrame, axis: str, a: str, b: str, metric: str, pairing: Pairing) -> Groups:
    """The values of `metric`, by setting of the other axes and seed; raises UserError as `compare_groups`."""
    if pairing not in ("seed", "none"):
        raise UserError(f"pairing = {pairing!r}: must be seed or none")
    axes = [name.removeprefix("axis.") for name in frame.columns if name.startswith("axis.")]
    if axis not in axes:
        raise UserError(f"axis = {axis!r}: the grid has {', '.join(axes) or 'no axis'}")
    if metric not in frame.columns or not pd.api.types.is_numeric_dtype(frame[metric]):
        numbers = [str(c) for c in frame.columns if pd.api.types.is_numeric_dtype(frame[c])]
        raise UserError(f"metric = {metric!r}: is not a column of numbers; there are {', '.join(numbers)}")
    labels = frame[f"axis.{axis}"].astype(str)
    for name in (a, b):
        if not (labels == name).any():
            raise UserError(f"axis {axis}: no cell has label {name!r}; there are {', '.join(sorted(set(labels)))}")
    if a == b:
        raise UserError(f"axis {axis}: a and b are both {a!r}; name two labels")
    cells = frame[labels.isin([a, b])]
    if "state" in frame.columns and (cells["state"] != "complete").any():
        missing = cells[cells["state"] != "complete"]["cell"].tolist()
        raise UserError(f"cells not complete: {', '.join(map(str, missing))}; finish them with `ppo-repro grid`")
    others = [f"axis.{name}" for name in axes if name != axis]
    values = _by_cell(cells, [f"axis.{axis}", *others, "seed"], metric)
    strata = [_strata(values[values[f"axis.{axis}"].astype(str) == name], others, metric) for name in (a, b)]
    _check_strata(strata[0], strata[1], pairing, (a, b))
    return Groups(*([np.asarray(stratum[key][1]) for key in sorted(stratum)] for stratum in strata))


def _by_cell(cells: pd.DataFrame, keys: list[str], metric: str) -> pd.DataFrame:
    if "iteration" in cells.columns:
        # a column that is null in some iterations, such as an evaluation, is averaged over the others
        values = pd.DataFrame(cells.groupby(keys)[metric].mean()).reset_index()
    else:
        values = cells[[*keys, metric]]
    repeated = values[values.duplicated(keys)]
    if len(repeated):
        raise UserError(f"seed {repeated['seed'].iloc[0]} occurs twice; give the table of one grid")
    if not np.isfinite(values[metric].to_numpy(np.float64)).all():
        raise UserError(f"metric {metric}: not finite in some cells; choose another, or compare other labels")
    return values


def _strata(
    values: pd.DataFrame, others: list[str], metric: str
) -> dict[tuple[str, ...], tuple[list[int], list[float]]]:
    strata: dict[tuple[str, ...], tuple[list[int], list[float]]] = {}
    for row in values.sort_values("seed").to_dict("records"):
        seeds, numbers = strata.setdefault(tuple(str(row[name]) for name in others), ([], []))
        seeds.append(int(row["seed"]))
        numbers.append(float(row[metric]))
    return strata


def _check_strata(
    a: dict[tuple[str, ...], tuple[list[int], list[float]]],
    b: dict[tuple[str, ...], tuple[list[int], list[float]]],
    pairing: Pairing,
    labels: tuple[str, str],
) -> None:
    if a.keys() != b.keys():
        raise UserError(f"{labels[0]} and {labels[1]} were not run with the same settings of the other axes")
    sets = {tuple(seeds) for group in (a, b) for seeds, _ in group.values()}
    if pairing == "seed" and len(sets) > 1:
        raise UserError(f"the cells have different seeds, {sorted(sets)}; compare them unpaired")
    if any(len({tuple(seeds) for seeds, _ in group.values()}) > 1 for group in (a, b)):
        raise UserError("the settings of the other axes have different seeds; select the cells of one setting")


def outcome_rows(
    groups: Groups,
    metric: str,
    rng: np.random.Generator,
    *,
    pairing: Pairing,
    margin: float | None,
    alpha: float,
    draws: int,
) -> list[Row]:
    """The rows of one metric."""
    paired, level = pairing == "seed", 1 - alpha
    # the seed is the unit: settings that share it are not independent
    a, b = np.mean(groups.a, axis=0), np.mean(groups.b, axis=0)
    estimate = one_sample(b - a) if paired else welch(a, b)
    low, high = t_interval(estimate, level)
    n = len(a) if paired else len(a) + len(b)
    if paired:
        test = sign_flip(b - a, rng, draws)
        how, p_value = f"{test.relabellings} sign changes{' (all)' if test.exact else ''}, paired by seed", test.p_value
    else:
        how, p_value = "Welch's t, unpaired", t_test(estimate)
    rows = [Row("outcome", metric, estimate.mean, n, f"{how}; Student interval", "difference", p_value, low, high)]
    if margin is not None:
        low, high = t_interval(estimate, 1 - 2 * alpha)
        p_value = tost(estimate, margin)
        rows.append(Row("outcome", metric, estimate.mean, n, "TOST", "equivalence", p_value, low, high, margin=margin))
    for name, statistic in (
        ("mean", mean_difference),
        ("iqm", iqm_difference),
        ("p_improvement", probability_of_improvement),
    ):
        value, low, high = stratified_bootstrap(
            groups.a, groups.b, statistic, rng, paired=paired, level=level, draws=draws
        )
        rows.append(Row("outcome", f"{metric}.{name}", value, n, "bootstrap of seeds", ci_lo=low, ci_hi=high))
    return [*rows, *_power_rows(a, b, metric, rng, paired, alpha)]


def _power_rows(a: Floats, b: Floats, metric: str, rng: np.random.Generator, paired: bool, alpha: float) -> list[Row]:
    smaller = min(len(a), len(b))
    sd = math.nan
    if smaller > 1:
        sd = float((b - a).std(ddof=1)) if paired else math.sqrt((float(a.var(ddof=1)) + float(b.var(ddof=1))) / 2)
    effect = minimum_detectable_effect(sd, smaller, rng, paired=paired, alpha=alpha)
    rate = null_rejection_rate(smaller, rng, paired=paired, alpha=alpha) if smaller > 1 else math.nan
    halves = split_rejection_rate(a, rng, alpha=alpha)
    return [
        Row("outcome", f"{metric}.detectable", effect, smaller, "found in 80 % of simulations, spread as here"),
        Row("outcome", f"{metric}.false_positives", rate, smaller, "rate of this test in simulations without effect"),
        Row("outcome", f"{metric}.aa", halves, len(a), "rate of Welch's t between random halves of a"),
    ]
