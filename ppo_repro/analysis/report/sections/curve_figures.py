"""Draw curves over the iterations: a line per run or setting, with its band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ppo_repro.analysis.html.axes import axis_for
from ppo_repro.analysis.html.charts import Line, Rule, legend, line_chart
from ppo_repro.analysis.html.markup import number
from ppo_repro.analysis.html.page import Figure, Section
from ppo_repro.analysis.report.data.metrics import Metric
from ppo_repro.analysis.report.data.run_curves import Curves
from ppo_repro.analysis.report.data.run_facts import Facts
from ppo_repro.statistics.clusters import Floats


@dataclass(frozen=True)
class PageLine:
    """A run, or a setting with several seeds, as one line in every chart of a page.

    `curves` has the curve of each metric. `seeds` has the same of single runs, which the charts draw as thin lines.
    `tooltip` is a longer text than `name`.
    """

    name: str
    curves: Curves
    seeds: tuple[Curves, ...] = ()
    tooltip: str = ""

    def values(self, metric: str) -> Floats:
        """Return the values of a metric; [] if the run or setting does not have it."""
        return self.curves[metric].value if metric in self.curves else np.zeros(0)

    def line(self, metric: str, colour: int) -> Line:
        """Return the line of a metric in a chart."""
        curve, seeds = self.curves[metric], [seed[metric] for seed in self.seeds if metric in seed]
        parts = tuple(Line(self.name, seed.iteration.astype(np.float64), seed.value) for seed in seeds)
        at = curve.iteration.astype(np.float64)
        return Line(self.name, at, curve.value, curve.low, curve.high, colour, parts, self.tooltip)


def lines_of(page_lines: Sequence[PageLine], metric: str) -> list[Line]:
    """Return the lines of a metric in one chart; each run or setting has the same colour in all charts."""
    return [line.line(metric, colour) for colour, line in enumerate(page_lines) if metric in line.curves]


def informative(wanted: Sequence[Metric], page_lines: Sequence[PageLine]) -> list[Metric]:
    """Return the metrics without accuracies that equal their score, and without settings that never change."""

    def is_informative(metric: Metric, line: PageLine) -> bool:
        values = line.values(metric.key)
        if metric.is_setting:
            return len(np.unique(values)) > 1
        return not np.array_equal(values, line.values(metric.accuracy_of))

    return [metric for metric in wanted if any(is_informative(metric, line) for line in page_lines)]


def metric_figures(
    wanted: Sequence[Metric], page_lines: Sequence[PageLine], band: str = "", forked_at: int | None = None
) -> list[Figure]:
    """Return one figure per metric that a line has, without a legend.

    Args:
        page_lines: the lines; each has one colour in all figures.
        band: what lines and bands are on a page of several runs; "" takes each metric's text for the page of one run.
        forked_at: the iteration that a dotted line marks.
    """
    figures = []
    for metric in informative(wanted, page_lines):
        lines = lines_of(page_lines, metric.key)
        if chart := curve_chart(metric.title, metric.unit, lines, forked_at, has_legend=False):
            caption = "; ".join(filter(None, [metric.caption, band or metric.band, equal_lines(lines)])) + "."
            figures.append(Figure(metric.title, chart, caption, _numbers(page_lines, metric.key)))
    return figures


def _numbers(page_lines: Sequence[PageLine], metric: str) -> pd.DataFrame:
    """Return the curve of each line as rows; with several lines a column more, `line`, has their names."""
    tables = [line.curves[metric].table.assign(line=line.name) for line in page_lines if metric in line.curves]
    return tables[0].drop(columns="line") if len(tables) == 1 else pd.concat(tables, ignore_index=True)


def metric_by_step(metric: Metric, steps: pd.DataFrame) -> Figure:
    """Return the figure of a metric of the table `steps` by step, not by iteration."""
    at, values = np.arange(len(steps), dtype=np.float64), steps[metric.key].to_numpy(np.float64)
    alt = f"{metric.title} by step: {number(float(values[0]))} to {number(float(values[-1]))}."
    chart = line_chart([Line("this run", at, values)], axis_for("step", [at]), axis_for(metric.unit, [values]), alt)
    numbers = steps[["iteration", "minibatch", "pairs", metric.key]]
    return Figure(metric.title, chart, f"{metric.caption}.", numbers)


def equal_lines(lines: Sequence[Line]) -> str:
    """Return which lines have the same values, so that one hides the other; "" if none do."""
    groups: dict[tuple[bytes, bytes], list[str]] = {}
    for line in lines:
        groups.setdefault((line.x.tobytes(), line.y.tobytes()), []).append(line.name)
    same = [" and ".join(f"`{name}`" for name in names) for names in groups.values() if len(names) > 1]
    return "; ".join(f"the same line: {names}" for names in same)


def curve_chart(
    title: str, unit: str, lines: Sequence[Line], forked_at: int | None = None, has_legend: bool = True
) -> str:
    """Return a chart of lines over the iterations, "" without a line.

    Args:
        forked_at: the iteration that a dotted line marks.
        has_legend: whether the chart names its lines.
    """
    if not lines:
        return ""
    ends = "; ".join(f"{line.name}: {number(float(line.y[0]))} to {number(float(line.y[-1]))}" for line in lines)
    ranges = [values for line in lines for values in (line.y, line.low, line.high)]
    x = axis_for("iteration", [line.x for line in lines])
    rules = () if forked_at is None else (Rule(forked_at, "forked here", along="x"),)
    return line_chart(lines, x, axis_for(unit, ranges), f"{title} by iteration. {ends}.", rules, has_legend)


def run_chart(facts: Facts, curves: Curves) -> str:
    """Return the chart of the first screen from a run's curves."""
    shown = facts.content.first_chart
    lines = [PageLine(m.label, curves).line(m.key, i) for i, m in enumerate(shown) if m.key in curves]
    return curve_chart(shown[-1].title.capitalize(), shown[-1].title, lines, facts.forked_at)


def main_chart(facts: Facts, page_lines: Sequence[PageLine]) -> str:
    """Return a chart with the evaluated metric of each line, or with the sampled one if nothing was evaluated."""
    charts = (
        curve_chart(metric.title.capitalize(), metric.title, lines_of(page_lines, metric.key))
        for metric in facts.content.first_chart
    )
    return next(filter(None, charts), "")


def curve_sections(facts: Facts, page_lines: Sequence[PageLine], notes: Sequence[str], band: str) -> list[Section]:
    """Return the sections Learning and Optimisation: figures below `notes`; `band` explains the bands."""
    names = legend([line.name for line in page_lines])
    learning, optimisation = (
        metric_figures(wanted, page_lines, band) for wanted in (facts.content.learning, facts.content.optimisation)
    )
    return [
        Section("learning", "Learning", notes, learning, legend=names),
        Section("optimisation", "Optimisation", notes, optimisation, legend=names),
    ]
