"""How scores, or returns of episodes, are distributed, and how that changes over the iterations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.report.drawing.axes import Axis, axis_for
from analysis.report.drawing.charts import bar_chart, heat_map
from analysis.report.drawing.figure import Figure
from analysis.report.drawing.markup import number

Floats = npt.NDArray[np.float64]
MAX_VALUES = 12  # up to so many different values each has a bin of its own
BINS = 24
MAX_COLUMNS = 80


@dataclass(frozen=True)
class Bins:
    """Bins of values: `edges` on an axis on which they are equally wide, their names, and marks for the axis."""

    edges: Floats
    names: tuple[str, ...]
    marks: tuple[tuple[float, str], ...]
    distinct: Floats | None  # the values, where each has a bin of its own; else None

    def counts(self, values: Floats) -> npt.NDArray[np.int64]:
        """How many finite values lie in each bin; the last one holds its upper end too."""
        finite = values[np.isfinite(values)]
        if self.distinct is not None:
            found = np.searchsorted(self.distinct, finite)
        else:
            found = np.clip(np.searchsorted(self.edges, finite, side="right") - 1, 0, len(self.names) - 1)
        return np.bincount(found, minlength=len(self.names)).astype(np.int64)


def bins_of(values: Floats, name: str) -> Bins:
    """A bin for each value where there are few different ones, else BINS of equal width over their range."""
    finite = values[np.isfinite(values)]
    distinct = np.unique(finite)
    if len(distinct) <= MAX_VALUES:
        edges = np.arange(len(distinct) + 1, dtype=np.float64)
        words = [number(float(value), 3) for value in distinct]
        marks = tuple((k + 0.5, word) for k, word in enumerate(words))
        return Bins(edges, tuple(f"{name} {word}" for word in words), marks, distinct)
    edges = np.linspace(finite.min(), finite.max(), BINS + 1)
    ends = [number(float(edge), 4) for edge in edges]
    names = tuple(f"{name} {lo} to {hi}" for lo, hi in pairwise(ends))
    return Bins(edges, names, (), None)


def distribution_figures(values: Mapping[int, Floats], name: str, of: str) -> tuple[Figure, ...]:
    """The values of the first and of the last iteration as bars, and of every iteration as shades.

    `values` by iteration; `name` is what they are, such as `score`, `of` what has one, such as `responses`.
    """
    filled = {iteration: found[np.isfinite(found)] for iteration, found in values.items()}
    filled = {iteration: found for iteration, found in filled.items() if len(found)}
    if not filled:
        return ()
    bins = bins_of(np.concatenate([*filled.values()]), name)
    counts = {iteration: bins.counts(found) for iteration, found in filled.items()}
    ends = {f"iteration {i}": counts[i] for i in sorted({min(counts), max(counts)})}
    caption = f"Share of the {of} with each {name}, first and last iteration."
    bars = grouped_bars(f"Distribution of the {name}", ends, bins, name, of, caption)
    return (bars, _shades(counts, bins, name, of)) if len(counts) > 1 else (bars,)


def _axis(bins: Bins, name: str) -> Axis:
    return Axis(name, float(bins.edges[0]), float(bins.edges[-1]), ticks=bins.marks)


def grouped_bars(
    title: str, counts: Mapping[str, npt.NDArray[np.int64]], bins: Bins, name: str, of: str, caption: str
) -> Figure:
    """Counts in bins of several groups, as shares of each group in percent, side by side."""
    groups = [(group, 100.0 * found / found.sum()) for group, found in counts.items()]
    y = axis_for(f"% of the {of}", [share for _, share in groups], include=(0.0,))
    about = "; ".join(
        f"{group}: most often {bins.names[int(share.argmax())]} ({number(float(share.max()), 3)} %)"
        for group, share in groups
    )
    chart = bar_chart(bins.edges[:-1], bins.edges[1:], groups, _axis(bins, name), y, about, names=bins.names)
    numbers = pd.DataFrame({name: [text.removeprefix(f"{name} ") for text in bins.names], **dict(counts)})
    return Figure(title, chart, caption, numbers)


def _shades(counts: Mapping[int, npt.NDArray[np.int64]], bins: Bins, name: str, of: str) -> Figure:
    every = sorted(counts)
    columns = [chunk for chunk in np.array_split(np.array(every), min(MAX_COLUMNS, len(every))) if len(chunk)]
    grid = np.array([np.sum([counts[int(i)] for i in chunk], axis=0) for chunk in columns], dtype=np.float64)
    shares = 100.0 * grid / grid.sum(axis=1, keepdims=True)
    edges = np.array([*(float(chunk[0]) for chunk in columns), float(every[-1] + 1)])
    names = [f"iteration {c[0]}" if len(c) == 1 else f"iterations {c[0]} to {c[-1]}" for c in columns]
    x = Axis("iteration", float(edges[0]), float(edges[-1]))
    about = f"Share of the {of} with each {name}, by iteration."
    chart = heat_map(
        edges, bins.edges, shares, x, _axis(bins, name), about,
        what=f"% of the {of}", x_names=names, y_names=bins.names,
    )  # fmt: skip
    rows = [
        {
            "iterations": f"{c[0]}" if len(c) == 1 else f"{c[0]} to {c[-1]}",
            name: text.removeprefix(f"{name} "),
            of: int(n),
        }
        for c, row in zip(columns, grid, strict=True)
        for text, n in zip(bins.names, row, strict=True)
        if n
    ]
    caption = f"Each column is an iteration; stronger is a larger share of its {of} (log scale)."
    return Figure(f"{name.capitalize()} over the iterations", chart, caption, pd.DataFrame(rows))
