"""Two groups of seeds of a grid: does a setting change the outcome?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from ppo_repro.analysis.compare.rows import Row, run_compare
from ppo_repro.analysis.stats import significance
from ppo_repro.analysis.stats.significance import Floats
from ppo_repro.base.errors import UserError
from ppo_repro.records.grid import axes_of

Strata = tuple[Floats, ...]  # for each setting of the other axes the values of its seeds, in ascending order


def compare_groups(
    frame: pd.DataFrame,
    axis: str,
    a: str,
    b: str,
    metric: str | Sequence[str],
    rng: np.random.Generator,
    *,
    paired: bool = True,
    margin: float | None = None,
    alpha: float = 0.05,
) -> pd.DataFrame:
    """Compare the cells of a grid with axis = b with the cells with axis = a; differences are b - a.

    The unit is the seed: differences are first averaged over the settings of the other axes. Each metric has a row with
    its difference, and a row with the smallest detectable effect. Holm's correction is over the metrics.

    Args:
        frame: a grid's cells.parquet, or its results.parquet, which is averaged over the iterations of each cell.
        axis: the axis to compare.
        a, b: two labels of the axis.
        metric: the columns to compare.
        rng: draws sign changes.
        paired: test the differences of equal seeds by sign changes, with Student's interval; or use Welch's t-test.
        margin: also test that the difference is smaller than this (TOST), in the unit of the metric.
        alpha: level of the tests and intervals.

    Returns:
        The table of `run_compare`, at the level `outcome`.

    Raises:
        UserError: an unknown axis, label or metric, missing or incomplete cells, or values that are not finite.
    """
    if not 0 < alpha < 0.5:
        raise UserError(f"alpha = {alpha}: must be greater than 0 and less than 0.5")
    if margin is not None and not margin > 0:
        raise UserError(f"margin = {margin}: must be positive, in the unit of the metric")
    rows = []
    for name in [metric] if isinstance(metric, str) else metric:
        groups = _groups(frame, axis, a, b, name, paired)
        rows += _rows(groups, name, rng, paired, margin, alpha)
    return run_compare(f"{axis}={a}", f"{axis}={b}", rows, alpha)


def _groups(frame: pd.DataFrame, axis: str, a: str, b: str, metric: str, paired: bool) -> tuple[Strata, Strata]:
    """Return the values of `metric` of both groups. `compare_groups` describes arguments and errors."""
    axes = axes_of(frame)
    if f"axis.{axis}" not in axes:
        names = ", ".join(name.removeprefix("axis.") for name in axes)
        raise UserError(f"axis = {axis!r}: the grid has {names or 'no axis'}")
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
    if metric not in cells.columns or not pd.api.types.is_numeric_dtype(cells[metric]):
        numbers = [str(c) for c in cells.columns if pd.api.types.is_numeric_dtype(cells[c])]
        raise UserError(f"metric = {metric!r}: is not a column of numbers; there are {', '.join(numbers)}")
    keys = [*axes, "seed"]
    if "iteration" in cells.columns:
        # a column that is null in some iterations, such as an evaluation, is averaged over the others
        cells = pd.DataFrame(cells.groupby(keys)[metric].mean()).reset_index()
    if (twice := cells.duplicated(keys)).any():
        raise UserError(f"seed {cells[twice]['seed'].iloc[0]} occurs twice; give the table of one grid")
    if not np.isfinite(cells[metric].to_numpy(np.float64)).all():
        raise UserError(f"metric {metric}: not finite in some cells; choose another, or compare other labels")
    setting = cells[[name for name in axes if name != f"axis.{axis}"]].astype(str).agg(", ".join, axis=1)
    cells = cells.assign(setting=setting if len(axes) > 1 else "")
    tables = [
        cells[cells[f"axis.{axis}"].astype(str) == name].pivot(index="seed", columns="setting", values=metric)
        for name in (a, b)
    ]
    if set(tables[0]) != set(tables[1]):
        raise UserError(f"{a} and {b} were not run with the same settings of the other axes")
    if any(table.isna().any(axis=None) for table in tables):
        raise UserError("the settings of the other axes have different seeds; select the cells of one setting")
    if paired and set(tables[0].index) != set(tables[1].index):
        raise UserError("the cells have different seeds; compare them unpaired")
    group_a, group_b = (tuple(table[name].to_numpy(np.float64) for name in sorted(map(str, table))) for table in tables)
    return group_a, group_b


def _rows(
    groups: tuple[Strata, Strata],
    metric: str,
    rng: np.random.Generator,
    paired: bool,
    margin: float | None,
    alpha: float,
) -> list[Row]:
    """Return the rows of a comparison for one metric."""
    level = 1 - alpha
    # the seed is the unit: settings that share it are not independent
    a, b = (np.mean(group, axis=0) for group in groups)
    estimate = significance.one_sample(b - a) if paired else significance.welch(a, b)
    low, high = significance.t_interval(estimate, level)
    n = len(a) if paired else len(a) + len(b)
    if paired:
        test = significance.sign_flip(b - a, rng)
        how, p_value = f"{test.relabellings} sign changes{' (all)' if test.exact else ''}, paired by seed", test.p_value
    else:
        how, p_value = "Welch's t, unpaired", significance.t_test(estimate)
    rows = [Row("outcome", metric, estimate.mean, n, f"{how}; Student interval", "difference", p_value, low, high)]
    if margin is not None:
        low, high = significance.t_interval(estimate, 1 - 2 * alpha)
        p_value = significance.tost(estimate, margin)
        rows.append(Row("outcome", metric, estimate.mean, n, "TOST", "equivalence", p_value, low, high, margin=margin))
    smaller, sd = min(len(a), len(b)), math.nan
    if smaller > 1:
        sd = float((b - a).std(ddof=1)) if paired else math.sqrt((float(a.var(ddof=1)) + float(b.var(ddof=1))) / 2)
    effect = significance.detectable(sd, smaller, paired=paired, alpha=alpha)
    if paired and effect > 0 and 2.0 ** (1 - smaller) > alpha:
        effect = math.inf  # sign changes of n pairs never reach alpha: their smallest p is 2 / 2**n
    return [
        *rows,
        Row("outcome", f"{metric}.detectable", effect, smaller, "found with probability 0.8, spread as here"),
    ]
