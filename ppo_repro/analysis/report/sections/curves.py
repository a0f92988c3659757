"""Draw curves over the iterations, of one run or over seeds, with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ppo_repro.analysis.html.charts import Line, Rule, axis_for, legend, line_chart
from ppo_repro.analysis.html.markup import number
from ppo_repro.analysis.html.page import Figure, Section
from ppo_repro.analysis.mean_text import finite_of
from ppo_repro.analysis.report.data.metrics import Plotted, Range
from ppo_repro.analysis.report.data.run_curves import Point
from ppo_repro.analysis.report.data.run_facts import Facts
from ppo_repro.analysis.significance import one_sample, t_interval
from ppo_repro.statistics.clusters import Floats


@dataclass(frozen=True)
class PageLine:
    """A run, or a setting with several seeds, as one line in every chart of a page.

    `curves` is a frame of curves with all metrics. `seeds` are frames of curves too, of single runs, which the charts
    draw as thin lines. `tooltip` is a longer text than `name`.
    """

    name: str
    curves: pd.DataFrame
    seeds: tuple[pd.DataFrame, ...] = ()
    tooltip: str = ""


MANY_SEEDS = 5  # charts show fewer seeds one by one


def over_seeds(runs: Sequence[pd.DataFrame], metrics: Sequence[Plotted], score: Range) -> pd.DataFrame:
    """Return the mean over seeds as a frame of curves; an iteration's mean is over the seeds that have the iteration.

    low and high are the ends of the 95 % Student interval, clipped to the possible values. With fewer than MANY_SEEDS
    seeds an interval says little, so low and high are the smallest and the largest value. `score` is the possible range
    of scores.
    """
    ranges = {metric.key: score if metric.possible is None else metric.possible for metric in metrics}
    rows = []
    for (metric, iteration), group in pd.concat(runs).groupby(["metric", "iteration"]):
        values, _ = finite_of(group["value"])  # the column `seeds` counts them
        if len(values):
            estimate = one_sample(values)
            ends = (values.min(), values.max()) if len(values) < MANY_SEEDS else t_interval(estimate, 0.95)
            rows.append((iteration, metric, estimate.mean, *np.clip(ends, *ranges[str(metric)]), len(values)))
    return pd.DataFrame(rows, columns=[*Point._fields, "seeds"])


def _rows(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    return frame[frame["metric"] == metric].sort_values("iteration")


def informative(wanted: Sequence[Plotted], page_lines: Sequence[PageLine]) -> list[Plotted]:
    """Return the metrics without accuracies that equal their score, and without settings that never change."""
    return [metric for metric in wanted if _is_informative(metric, page_lines)]


def _is_informative(metric: Plotted, page_lines: Sequence[PageLine]) -> bool:
    values, scores = (
        [_rows(line.curves, name)["value"].to_numpy(np.float64) for line in page_lines]
        for name in (metric.key, metric.accuracy_of)
    )
    if metric.is_setting:
        return any(len(np.unique(recorded)) > 1 for recorded in values)
    return not all(map(np.array_equal, values, scores))


def metric_figures(
    wanted: Sequence[Plotted], page_lines: Sequence[PageLine], band: str = "", forked_at: int | None = None
) -> list[Figure]:
    """Return one figure per metric that a line has, without a legend.

    Args:
        page_lines: the lines; each has one colour in all figures.
        band: what lines and bands are on a page of several runs; "" takes each metric's text for the page of one run.
        forked_at: the iteration that a dotted line marks.
    """
    figures = []
    for metric in informative(wanted, page_lines):
        drawn = [(line, metric.key) for line in page_lines]
        if chart := curve_chart(metric.title, metric.unit, drawn, forked_at, has_legend=False):
            caption = "; ".join(filter(None, [metric.caption, band or metric.band, equal_lines(drawn)])) + "."
            figures.append(Figure(metric.title, chart, caption, _numbers(drawn)))
    return figures


def _numbers(drawn: Sequence[tuple[PageLine, str]]) -> pd.DataFrame:
    """Return the rows of each line and metric; with several lines a column more, `line`, has their names."""
    rows = [_rows(line.curves, metric).assign(line=line.name).drop(columns="metric") for line, metric in drawn]
    filled = [frame for frame in rows if len(frame)]
    return filled[0].drop(columns="line") if len(filled) == 1 else pd.concat(filled, ignore_index=True)


def metric_by_step(metric: Plotted, steps: pd.DataFrame) -> Figure:
    """Return the figure of a metric of the table `steps` by step, not by iteration."""
    at, values = np.arange(len(steps), dtype=np.float64), steps[metric.key].to_numpy(np.float64)
    alt = f"{metric.title} by step: {number(float(values[0]))} to {number(float(values[-1]))}."
    chart = line_chart([Line("this run", at, values)], axis_for("step", [at]), axis_for(metric.unit, [values]), alt)
    numbers = steps[["iteration", "minibatch", "pairs", metric.key]]
    return Figure(metric.title, chart, f"{metric.caption}.", numbers)


def equal_lines(drawn: Sequence[tuple[PageLine, str]]) -> str:
    """Return which lines have the same values, so that one hides the other; "" if none do."""
    groups: dict[tuple[bytes, bytes], list[str]] = {}
    for line, metric in drawn:
        at, values, _, _ = _columns(line.curves, metric)
        if len(at):
            groups.setdefault((at.tobytes(), values.tobytes()), []).append(line.name)
    same = [" and ".join(f"`{name}`" for name in names) for names in groups.values() if len(names) > 1]
    return "; ".join(f"the same line: {names}" for names in same)


def curve_chart(
    title: str,
    unit: str,
    drawn: Sequence[tuple[PageLine, str]],
    forked_at: int | None = None,
    has_legend: bool = True,
) -> str:
    """Return a chart with one metric of each line, "" if no line has its metric.

    Args:
        drawn: each line, and its metric; the colour is the index.
        forked_at: the iteration that a dotted line marks.
        has_legend: whether the chart names its lines.
    """
    lines = []
    for colour, (line, metric) in enumerate(drawn):
        at, values, low, high = _columns(line.curves, metric)
        parts = tuple(_columns(curves, metric)[:2] for curves in line.seeds)
        if len(at):
            lines.append(Line(line.name, at, values, low, high, colour, parts, line.tooltip))
    if not lines:
        return ""
    ends = "; ".join(f"{line.name}: {number(float(line.y[0]))} to {number(float(line.y[-1]))}" for line in lines)
    ranges = [values for line in lines for values in (line.y, line.low, line.high)]
    x = axis_for("iteration", [line.x for line in lines])
    rules = () if forked_at is None else (Rule(forked_at, "forked here", along="x"),)
    return line_chart(lines, x, axis_for(unit, ranges), f"{title} by iteration. {ends}.", rules, has_legend)


def run_chart(facts: Facts, curves: pd.DataFrame) -> str:
    """Return the chart of the first screen from a run's frame of curves."""
    shown = facts.content.first_chart
    drawn, unit = [(PageLine(quantity.label, curves), quantity.key) for quantity in shown], shown[-1].title
    return curve_chart(unit.capitalize(), unit, drawn, facts.forked_at)


def main_chart(facts: Facts, page_lines: Sequence[PageLine]) -> str:
    """Return a chart with the evaluated metric of each line, or with the sampled one if nothing was evaluated."""
    charts = (
        curve_chart(quantity.title.capitalize(), quantity.title, [(line, quantity.key) for line in page_lines])
        for quantity in facts.content.first_chart
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


def _columns(frame: pd.DataFrame, metric: str) -> tuple[Floats, Floats, Floats, Floats]:
    """Return iteration, value, low and high of one metric."""
    rows = _rows(frame, metric)
    x, y, low, high = (rows[name].to_numpy(np.float64) for name in ("iteration", "value", "low", "high"))
    return x, y, low, high
