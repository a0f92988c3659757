"""Draw the distribution of scores, returns or margins."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pandas as pd

from ppo_repro.analysis.html.charts import Axis, axis_for, bar_chart
from ppo_repro.analysis.html.markup import number
from ppo_repro.analysis.html.page import Figure
from ppo_repro.statistics.clusters import Floats

MAX_VALUES = 12  # with at most this many different values, each value has a bar
BINS = 24


def distribution_figure(title: str, groups: Mapping[str, Floats], name: str, of: str, caption: str) -> Figure:
    """Draw the distribution of the finite values of each group, as bars in percent, side by side.

    Args:
        groups: the values of each group, at least one of them finite.
        name: the name of a value, for example `score`.
        of: the things that have a value, for example `responses`.
    """
    finite = {group: values[np.isfinite(values)] for group, values in groups.items()}
    everything = np.concatenate([*finite.values()])
    distinct = np.unique(everything)
    if len(distinct) <= MAX_VALUES:
        edges: Floats = np.arange(len(distinct) + 1, dtype=np.float64)
        words = [number(float(value), 3) for value in distinct]
        marks = tuple((k + 0.5, word) for k, word in enumerate(words))
        counts = {group: np.bincount(np.searchsorted(distinct, v), minlength=len(words)) for group, v in finite.items()}
    else:
        edges, marks = np.linspace(everything.min(), everything.max(), BINS + 1), ()
        words = [f"{lo} to {hi}" for lo, hi in pairwise(number(float(edge)) for edge in edges)]
        counts = {group: np.histogram(values, edges)[0] for group, values in finite.items()}
    shares = [(group, 100.0 * bars / bars.sum()) for group, bars in counts.items() if bars.any()]
    y = axis_for(f"% of the {of}", [values for _, values in shares], include=(0.0,))
    alt = "; ".join(
        f"{group}: most often {name} {words[int(values.argmax())]} ({number(float(values.max()), 3)} %)"
        for group, values in shares
    )
    x = Axis(name, float(edges[0]), float(edges[-1]), ticks=marks)
    chart = bar_chart(edges, shares, x, y, alt, [f"{name} {word}" for word in words])
    return Figure(title, chart, caption, pd.DataFrame({name: words, **counts}))


def change_figures(values: Mapping[int, Floats], name: str, of: str) -> list[Figure]:
    """Draw the distributions in the first and the last iteration with a finite value; [] if there is none."""
    filled = sorted(iteration for iteration, numbers in values.items() if np.isfinite(numbers).any())
    if not filled:
        return []
    groups = {f"iteration {i}": values[i] for i in (filled[0], filled[-1])}
    caption = f"Share of the {of} with each {name}, first and last iteration."
    return [distribution_figure(f"Distribution of the {name}", groups, name, of, caption)]
