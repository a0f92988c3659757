"""Draw the distribution of scores, returns or margins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis.html.axes import Axis, Tick, axis_for
from ppo_repro.analysis.html.charts import bar_chart
from ppo_repro.analysis.html.markup import number
from ppo_repro.analysis.html.page import Figure
from ppo_repro.statistics.clusters import Floats

MAX_VALUES = 12  # with at most this many different values, each value has a bar
BINS = 24


@dataclass(frozen=True)
class Bars:
    """Bars of a distribution: the value or range of each in words, and the counts of each group."""

    edges: Floats  # [bars + 1], on the x axis
    ticks: tuple[Tick, ...]  # of the x axis; the usual ones if empty
    words: list[str]  # [bars]
    counts: dict[str, npt.NDArray[np.int64]]  # [bars] each


def distribution_figure(title: str, groups: Mapping[str, Floats], name: str, of: str, caption: str) -> Figure:
    """Draw the distribution of the finite values of each group, as bars in percent, side by side.

    Args:
        groups: the values of each group, at least one of them finite.
        name: the name of a value, for example `score`.
        of: the things that have a value, for example `responses`.
    """
    finite = {group: values[np.isfinite(values)] for group, values in groups.items()}
    distinct = np.unique(np.concatenate([*finite.values()]))
    bars = _bars_of_values(distinct, finite) if len(distinct) <= MAX_VALUES else _bars_of_ranges(distinct, finite)
    shares = {group: 100.0 * counts / counts.sum() for group, counts in bars.counts.items() if counts.any()}
    y = axis_for(f"% of the {of}", shares.values(), include=(0.0,))
    alt = "; ".join(
        f"{group}: most often {name} {bars.words[int(values.argmax())]} ({number(float(values.max()), 3)} %)"
        for group, values in shares.items()
    )
    x = Axis(name, float(bars.edges[0]), float(bars.edges[-1]), ticks=bars.ticks)
    chart = bar_chart(bars.edges, shares, x, y, alt, [f"{name} {word}" for word in bars.words])
    return Figure(title, chart, caption, pd.DataFrame({name: bars.words, **bars.counts}))


def _bars_of_values(distinct: Floats, groups: Mapping[str, Floats]) -> Bars:
    """Return a bar of equal width for each value."""
    words = [number(float(value), 3) for value in distinct]
    counts = {g: np.bincount(np.searchsorted(distinct, values), minlength=len(words)) for g, values in groups.items()}
    ticks = tuple(Tick(k + 0.5, word) for k, word in enumerate(words))
    return Bars(np.arange(len(words) + 1, dtype=np.float64), ticks, words, counts)


def _bars_of_ranges(distinct: Floats, groups: Mapping[str, Floats]) -> Bars:
    """Return BINS bars from the smallest to the largest value."""
    edges = np.linspace(distinct[0], distinct[-1], BINS + 1)
    words = [f"{lo} to {hi}" for lo, hi in pairwise(number(float(edge)) for edge in edges)]
    return Bars(edges, (), words, {group: np.histogram(values, edges)[0] for group, values in groups.items()})


def change_figures(values: Mapping[int, Floats], name: str, of: str) -> list[Figure]:
    """Draw the distributions in the first and the last iteration with a finite value; [] if there is none."""
    filled = sorted(iteration for iteration, numbers in values.items() if np.isfinite(numbers).any())
    if not filled:
        return []
    groups = {f"iteration {i}": values[i] for i in (filled[0], filled[-1])}
    caption = f"Share of the {of} with each {name}, first and last iteration."
    return [distribution_figure(f"Distribution of the {name}", groups, name, of, caption)]
