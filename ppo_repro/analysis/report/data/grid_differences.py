"""Compare a result of a grid's settings, and of the labels of its axes, paired by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from ppo_repro.analysis.grid_table import Comparison, compared, paired_differences
from ppo_repro.analysis.report.data.folder_runs import Final, FolderRuns
from ppo_repro.analysis.report.data.metrics import Metric
from ppo_repro.analysis.run_tables import run_tables
from ppo_repro.analysis.significance import detectable
from ppo_repro.config.run import RunConfig
from ppo_repro.records.grid import CELLS, axes_of, read_grid_table


class Limits(NamedTuple):
    """The largest possible difference of two results, and of two sampled scores that were recorded."""

    possible: float
    recorded: float


@dataclass(frozen=True)
class SettingDifference:
    """A setting minus the first one; the interval has only differences that are possible."""

    comparison: Comparison
    detectable: float  # difference that the seeds show with probability 0.8; NaN if theirs are equal or not finite

    @property
    def is_clear(self) -> bool:
        """Return whether p is below 0.05."""
        return self.comparison.p_holm < 0.05


@dataclass(frozen=True)
class SettingDifferences:
    """Differences of a grid's settings from its first setting, paired by seed."""

    first: str  # the setting from which the others differ
    seeds: int
    largest: float  # difference that two results can have
    others: Sequence[SettingDifference]


@dataclass(frozen=True)
class AxisEffect:
    """A label of an axis minus its first label, averaged over the settings of the other axes, paired by seed."""

    axis: str
    first: str
    comparison: Comparison  # Holm's correction is over all labels of all axes


class _LabelDifference(NamedTuple):
    """A label of an axis minus its first label, for each seed."""

    axis: str
    first: str
    label: str
    by_seed: pd.Series


def setting_differences(finals: Sequence[Final], limits: Limits) -> SettingDifferences | None:
    """Compare each setting with the first one; None unless several settings have the same seeds, at least two."""
    seeds: dict[str, set[int]] = {}
    for final in finals:
        seeds.setdefault(final.point, set()).add(final.seed)
    first, *others = seeds
    if not others or len(seeds[first]) < 2 or any(seeds[other] != seeds[first] for other in others):
        return None
    by_seed = paired_differences(pd.DataFrame(finals), "value", first)
    # Holm's first test has the smallest level
    sizes = [detectable(float(d.std(ddof=1, skipna=False)), len(d), 0.05 / len(others)) for d in by_seed.values()]
    rows = [
        SettingDifference(_within(row, limits.possible), size)
        for row, size in zip(compared(by_seed.items()), sizes, strict=True)
    ]
    return SettingDifferences(first, len(seeds[first]), min(limits), rows)


def _within(row: Comparison, possible: float) -> Comparison:
    low, high = (float(np.clip(end, -possible, possible)) for end in (row.ci_lo, row.ci_hi))
    return row._replace(ci_lo=low, ci_hi=high)


def axis_effects(folder: Path, finals: Sequence[Final]) -> list[AxisEffect]:
    """Return the differences of an axis's labels from its first label.

    [] for a grid with one axis, or if a setting has a name of its own. An axis whose labels do not have the same
    settings of the other axes is left out.
    """
    cells = read_grid_table(folder / CELLS) if (folder / CELLS).exists() else pd.DataFrame()
    axes = axes_of(cells)
    labels = {", ".join(row): row for row in cells[axes].astype(str).itertuples(index=False, name=None)}
    if len(axes) < 2 or any(final.point not in labels for final in finals):
        return []
    settings = [labels[final.point] for final in finals]
    differences = [row for k, axis in enumerate(axes) for row in _label_differences(axis, k, settings, finals)]
    comparisons = compared((row.label, row.by_seed) for row in differences)
    return [AxisEffect(row.axis, row.first, each) for row, each in zip(differences, comparisons, strict=True)]


def _label_differences(
    axis: str, k: int, settings_of_runs: Sequence[tuple[str, ...]], finals: Sequence[Final]
) -> list[_LabelDifference]:
    """Compare each other label of axis number k with the first one; [] if the labels have different settings."""
    settings = set(settings_of_runs)
    others = {row[:k] + row[k + 1 :] for row in settings}
    if len(settings) != len(others) * len({row[k] for row in settings}):
        return []
    by_seed = (
        pd.DataFrame(finals).assign(point=[row[k] for row in settings_of_runs]).groupby(["point", "seed"], sort=False)
    )
    # a seed that lacks a value has no mean, and so its label no difference
    means = by_seed["value"].agg(lambda values: values.mean(skipna=False)).reset_index()
    first, name = settings_of_runs[0][k], axis.removeprefix("axis.")
    return [_LabelDifference(name, first, *pair) for pair in paired_differences(means, "value", first).items()]


def limits_of(runs: FolderRuns, result: Metric) -> Limits:
    """Return the limits of a result; a result without limits has infinite ones."""
    if (possible := result.possible) is not None:
        return Limits(possible[1] - possible[0], math.inf)
    ends = [run.facts.config.reward.score_range for run in runs.listed if isinstance(run.facts.config, RunConfig)]
    scores = pd.concat(run_tables(run.facts.run_dir).read("sequences", ["scores"])["scores"] for run in runs.listed)
    return Limits(max(high for _, high in ends) - min(low for low, _ in ends), float(scores.max() - scores.min()))
