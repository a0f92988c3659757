"""Say the question of a grid and its answer: the differences of its settings, paired by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ppo_repro.analysis.grid_table import Comparison
from ppo_repro.analysis.html.markup import number, table
from ppo_repro.analysis.html.page import Card, Statement, scrolled
from ppo_repro.analysis.mean_text import mean_and_half_width, mean_and_range
from ppo_repro.analysis.report.data.folder_runs import Final
from ppo_repro.analysis.report.data.grid_differences import AxisEffect, SettingDifferences
from ppo_repro.analysis.report.data.run_curves import MANY_SEEDS
from ppo_repro.config.files import read_tree
from ppo_repro.records.grid import GRID


def question_card(folder: Path) -> Card:
    """Return the card with the question of a grid, what was expected, and the axes that name the settings."""
    tree = read_tree(folder / GRID)
    sentences = [str(tree["question"]), f"Expected: {tree['expectation']}"]
    if axes := [axis for axis in tree.get("axes") or () if axis != "setting"]:
        sentences.append(f"Settings are named by {', '.join(axes)}.")
    return Card("What was the question?", [Statement("fact", text) for text in sentences])


def answer_statements(finals: Sequence[Final], differences: SettingDifferences | None, title: str) -> list[Statement]:
    """Return the sentence of the answer, and one about each setting that differs; `title` names the result."""
    if differences is None:
        values = [final.value for final in finals]
        points = {final.point for final in finals}
        if len(points) == 1:
            return [Statement("fact", f"There is one setting: {title} {spread(values)}.")]
        needs = "No differences with intervals: they need the same seeds, at least two, in every setting."
        return [Statement("fact", needs)]
    count, clear = len(differences.others), [other.comparison for other in differences.others if other.is_clear]
    test = f"paired t-tests over {differences.seeds} seeds, Holm's correction, p below 0.05"
    answer = f"{len(clear)} of {count} settings differ from `{differences.first}` in {title} ({test})."
    if lost := sum(math.isnan(other.comparison.difference) for other in differences.others):
        answer += f" {lost} of {count} cannot be compared, because a result is not finite."
    differing = [
        Statement(
            "differs",
            f"`{row.point}`: {row.difference:+.3f}, between {row.ci_lo:+.3f} and {row.ci_hi:+.3f} (p {row.p_holm:.2g})",
        )
        for row in clear
    ]
    return [Statement("fact", answer + _power(differences)), *differing]


def _power(differences: SettingDifferences) -> str:
    """Say which difference the seeds would have shown in every setting that has no clear one; "" if all have one."""
    sizes = [
        other.detectable for other in differences.others if not other.is_clear and not math.isnan(other.detectable)
    ]
    undetected = max(sizes, default=0.0)
    if undetected > differences.largest:
        return (
            f" {differences.seeds} seeds can show nothing here: with probability 0.8 they find a difference of "
            f"{number(undetected, 2)} or more, and two values differ by {number(differences.largest, 2)} at most."
        )
    if undetected > 0:
        return f" A difference of {number(undetected, 2)} or more would have been found with probability 0.8."
    return ""


def differences_card(differences: SettingDifferences) -> Card:
    """Return the card with the table of all differences."""
    sizes = [other.detectable for other in differences.others]
    rows = pd.DataFrame(
        {
            "setting": [other.comparison.point for other in differences.others],
            **_columns([other.comparison for other in differences.others], f"minus {differences.first}"),
            "smallest detectable difference": [
                "too few seeds" if size > differences.largest else number(size, 2) for size in sizes
            ],
        }
    )
    caption = "p with Holm's correction; smallest detectable difference: found with probability 0.8"
    return Card("Differences, paired by seed", blocks=[scrolled(table(rows, caption))])


def effects_card(effects: Sequence[AxisEffect], title: str) -> Card:
    """Return the card with the table of the main effects; `title` names the result."""
    rows = pd.DataFrame(
        {
            "axis": [effect.axis for effect in effects],
            "difference of": [f"{effect.comparison.point} minus {effect.first}" for effect in effects],
            **_columns([effect.comparison for effect in effects], title),
        }
    )
    how = [Statement("fact", "Each row averages a seed over the settings of the other axes.")]
    return Card("Main effects of the axes", how, [scrolled(table(rows, "p with Holm's correction"))])


def _columns(rows: Sequence[Comparison], name: str) -> dict[str, list[str]]:
    """Return the columns `name`, 95 % interval and p of a table."""
    return {
        name: ["not finite" if math.isnan(row.difference) else f"{row.difference:+.3f}" for row in rows],
        # NaN also if all seeds have the same difference
        "95 % interval": [f"{number(row.ci_lo, 3)} to {number(row.ci_hi, 3)}" for row in rows],
        "p": [number(row.p_holm, 3) for row in rows],
    }


def spread(values: Sequence[float]) -> str:
    """Return mean and interval as text; mean, smallest and largest value of fewer than MANY_SEEDS seeds."""
    return mean_and_half_width(values) if len(values) >= MANY_SEEDS else mean_and_range(values)
