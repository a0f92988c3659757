"""Answer the question of a grid: the differences of its settings, paired by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppo_repro.analysis.grid_table import comparisons
from ppo_repro.analysis.html.markup import number, table
from ppo_repro.analysis.html.page import Card, Statement, scrolled
from ppo_repro.analysis.mean_text import mean_and_half_width, mean_and_range
from ppo_repro.analysis.report.data.metrics import Metric
from ppo_repro.analysis.report.sections.curves import MANY_SEEDS
from ppo_repro.analysis.significance import detectable, holm
from ppo_repro.config.files import read_tree
from ppo_repro.records.grid import CELLS, GRID, axes_of, read_grid_table


@dataclass(frozen=True)
class Differences:
    """Differences of a grid's settings from its first setting, paired by seed.

    `rows` are the rows of `comparisons`, with a column more: `detectable`, the difference that the seeds show with
    probability 0.8.
    """

    first: str  # the setting from which the others differ
    seeds: int
    largest: float  # difference that two results can have
    rows: pd.DataFrame

    @property
    def is_clear(self) -> pd.Series:
        """Return whether each row has p below 0.05."""
        return self.rows["p_holm"] < 0.05


def answer_cards(
    folder: Path,
    finals: pd.DataFrame,
    result: Metric,
    chart: str,
    possible: float,
    recorded: float = math.inf,
    about_chart: Sequence[Statement] = (),
) -> list[Card]:
    """Return the cards of a grid: question and expectation, answer, and the tables of differences if there are any.

    Args:
        finals: point, seed and results of each run.
        result: the column of `finals` that answers the question.
        chart: SVG of the result by iteration.
        possible: the largest possible difference of the result.
        recorded: the largest difference of two recorded values that the result averages.
        about_chart: sentences below the answer.
    """
    tree = read_tree(folder / GRID)
    sentences = [str(tree["question"]), f"Expected: {tree['expectation']}"]
    if axes := [axis for axis in tree.get("axes") or () if axis != "setting"]:
        sentences.append(f"Settings are named by {', '.join(axes)}.")
    question = Card("What was the question?", [Statement("fact", text) for text in sentences])
    if reason := _why_not_compared(finals, result):
        return [question, Card("What is the answer?", [Statement("fact", reason), *about_chart], chart=chart)]
    found = _differences(finals, result.key, possible, min(possible, recorded))
    caption = "p with Holm's correction; smallest detectable difference: found with probability 0.8"
    cards = [
        question,
        Card("What is the answer?", [*_statements(found, result.title), *about_chart], chart=chart),
        Card("Differences, paired by seed", blocks=[scrolled(table(_table(found), caption))]),
    ]
    effects = main_effects(folder, finals, result)
    if len(effects):
        how = [Statement("fact", "Each row averages a seed over the settings of the other axes.")]
        cards.append(Card("Main effects of the axes", how, [scrolled(table(effects, "p with Holm's correction"))]))
    return cards


def main_effects(folder: Path, finals: pd.DataFrame, result: Metric) -> pd.DataFrame:
    """Return the differences of an axis's labels from its first label, averaged over the other axes, paired by seed.

    Empty for a grid with one axis. An axis whose labels do not have the same settings of the other axes is left out.
    """
    if not (folder / CELLS).exists():
        return pd.DataFrame()
    cells = read_grid_table(folder / CELLS)
    axes = axes_of(cells)
    labels = cells[axes].astype(str).drop_duplicates()
    joined = finals.merge(labels.assign(point=labels.agg(", ".join, axis=1)), on="point")
    if len(axes) < 2 or len(joined) < len(finals):  # a setting may have a name of its own
        return pd.DataFrame()
    effects = [_effects_of(axis, joined, result.key) for axis in axes if _is_balanced(axis, axes, joined)]
    rows = pd.concat(effects) if effects else pd.DataFrame()
    if rows.empty:
        return rows
    rows["p_holm"] = holm(rows["p_value"].tolist())
    return pd.DataFrame(
        {
            "axis": rows["axis"],
            "difference of": [f"{row.point} minus {row.first}" for row in rows.itertuples()],
            **_columns(rows, result.title),
        }
    ).reset_index(drop=True)


def _is_balanced(axis: str, axes: Sequence[str], joined: pd.DataFrame) -> bool:
    """Return whether all labels of an axis have the same settings of the other axes."""
    others = joined[[name for name in axes if name != axis]].agg(", ".join, axis=1)
    return bool(others.groupby(joined[axis]).apply(lambda names: tuple(sorted(names))).nunique() == 1)


def _effects_of(axis: str, joined: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the rows of `comparisons` of an axis's labels with its first label, with columns `axis` and `first`."""
    by_seed = joined.groupby([axis, "seed"], as_index=False, sort=False)[column]
    # a seed that lacks a value has no mean, and so its label no difference
    means = pd.DataFrame(by_seed.agg(lambda values: values.mean(skipna=False)))
    first = str(means[axis].iloc[0])
    compared = comparisons(means.rename(columns={axis: "point"}), column, first)
    return compared.assign(axis=axis.removeprefix("axis."), first=first)


def _columns(compared: pd.DataFrame, name: str) -> dict[str, list[str]]:
    """Return the columns `name`, 95 % interval and p of a table, from a frame of `comparisons`."""
    return {
        name: ["not finite" if math.isnan(d) else f"{d:+.3f}" for d in compared["difference"]],
        # NaN also if all seeds have the same difference
        "95 % interval": [f"{number(row.ci_lo, 3)} to {number(row.ci_hi, 3)}" for row in compared.itertuples()],
        "p": [number(p, 3) for p in compared["p_holm"]],
    }


def _why_not_compared(finals: pd.DataFrame, result: Metric) -> str:
    """Return why settings have no differences with intervals; "" if they have."""
    seeds = finals.groupby("point")["seed"].apply(frozenset)
    if len(seeds) < 2:
        return f"There is one setting: {result.title} {spread(finals[result.key])}."
    if seeds.nunique() > 1 or len(seeds.iloc[0]) < 2:
        return "No differences with intervals: they need the same seeds, at least two, in every setting."
    return ""


def _differences(finals: pd.DataFrame, column: str, possible: float, largest: float) -> Differences:
    """Compare each setting with the first one, by a column of `finals`."""
    first, *others = (str(point) for point in finals["point"].unique())
    rows = comparisons(finals, column, first)
    rows[["ci_lo", "ci_hi"]] = rows[["ci_lo", "ci_hi"]].clip(-possible, possible)
    rows["detectable"] = _detectable(finals, column, [first, *others])
    return Differences(first, finals["seed"].nunique(), largest, rows)


def _statements(found: Differences, title: str) -> list[Statement]:
    """Return the sentence of the answer, and one about each setting that differs from the first one."""
    rows, is_clear = found.rows, found.is_clear
    test = f"paired t-tests over {found.seeds} seeds, Holm's correction, p below 0.05"
    answer = f"{is_clear.sum()} of {len(rows)} settings differ from `{found.first}` in {title} ({test})."
    if lost := int(rows["difference"].isna().sum()):
        answer += f" {lost} of {len(rows)} cannot be compared, because a result is not finite."
    differing = [
        Statement(
            "differs",
            f"`{row.point}`: {row.difference:+.3f}, between {row.ci_lo:+.3f} and {row.ci_hi:+.3f} (p {row.p_holm:.2g})",
        )
        for row in rows[is_clear].itertuples()
    ]
    return [Statement("fact", answer + _power(found)), *differing]


def _power(found: Differences) -> str:
    """Say which difference the seeds would have shown in every setting that has no clear one; "" if all have one."""
    undetected = float(found.rows["detectable"][~found.is_clear].max())
    if undetected > found.largest:
        return (
            f" {found.seeds} seeds can show nothing here: with probability 0.8 they find a difference of "
            f"{number(undetected, 2)} or more, and two values differ by {number(found.largest, 2)} at most."
        )
    if undetected > 0:
        return f" A difference of {number(undetected, 2)} or more would have been found with probability 0.8."
    return ""


def _table(found: Differences) -> pd.DataFrame:
    """Return the table of all differences, as text."""
    sizes = found.rows["detectable"]
    return pd.DataFrame(
        {
            "setting": found.rows["point"],
            **_columns(found.rows, f"minus {found.first}"),
            "smallest detectable difference": [
                "too few seeds" if size > found.largest else number(size, 2) for size in sizes
            ],
        }
    )


def _detectable(finals: pd.DataFrame, column: str, points: Sequence[str]) -> list[float]:
    """Return the difference that Holm's first test detects with probability 0.8, for each setting but the first."""
    first, *others = (finals[finals["point"] == point].set_index("seed")[column] for point in points)
    return [
        detectable(float((values - first).std(ddof=1, skipna=False)), len(first), 0.05 / len(others))
        for values in others
    ]


def spread(values: pd.Series) -> str:
    """Return mean and interval as text; mean, smallest and largest value of fewer than MANY_SEEDS seeds."""
    return mean_and_half_width(values) if len(values) >= MANY_SEEDS else mean_and_range(values)
