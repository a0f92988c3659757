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
from ppo_repro.analysis.report.data.run_facts import Facts
from ppo_repro.analysis.significance import one_sample, t_interval
from ppo_repro.statistics.clusters import Floats


@dataclass(frozen=True)
class Curves:
    """The curves of a run, or of a setting with several seeds: one line in every chart of a page.

    `frame` is a frame of curves with all metrics. `seeds` are frames of curves too, of single runs, which the charts
    draw as thin lines. `tooltip` is a longer text than `name`.
    """

    name: str
    frame: pd.DataFrame
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
    return pd.DataFrame(rows, columns=["iteration", "metric", "value", "low", "high", "seeds"])


def _rows(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    return frame[frame["metric"] == metric].sort_values("iteration")


def informative(wanted: Sequence[Plotted], curves: Sequence[Curves]) -> list[Plotted]:
    """Return the metrics without accuracies that equal their score, and without settings that never change."""
    return [metric for metric in wanted if _is_informative(metric, curves)]


def _is_informative(metric: Plotted, curves: Sequence[Curves]) -> bool:
    values, scores = (
        [curve.frame.loc[curve.frame["metric"] == name, "value"].to_numpy(np.float64) for curve in curves]
        for name in (metric.key, metric.accuracy_of)
    )
    if metric.is_setting:
        return any(len(np.unique(recorded)) > 1 for recorded in values)
    return not all(map(np.array_equal, values, scores))


def metric_figures(
    wanted: Sequence[Plotted], curves: Sequence[Curves], band: str = "", forked_at: int | None = None
) -> list[Figure]:
    """Return one figure per metric, with a line for each curve that has the metric, and no names of the lines.

    Args:
        curves: the curves; each has one colour in all figures.
        band: what lines and bands are on a page of several runs; "" takes each metric's text for the page of one run.
        forked_at: the iteration that a dotted line marks.
    """
    figures = []
    for metric in informative(wanted, curves):
        drawable = [(curve.name, rows) for curve in curves if len(rows := _rows(curve.frame, metric.key))]
        if drawable:
            drawn = [(curve, metric.key) for curve in curves]
            hidden = equal_curves(drawn)
            caption = "; ".join(filter(None, [metric.caption, band or metric.band, hidden])) + "."
            numbers = pd.concat([frame.drop(columns="metric").assign(line=name) for name, frame in drawable])
            numbers = numbers.reset_index(drop=True) if len(drawable) > 1 else numbers.drop(columns="line")
            chart = curve_chart(metric.title, metric.unit, drawn, forked_at, has_legend=False)
            figures.append(Figure(metric.title, chart, caption, numbers))
    return figures


def metric_by_step(metric: Plotted, steps: pd.DataFrame) -> Figure:
    """Return the figure of a metric of the table `steps` by step, not by iteration."""
    at, values = np.arange(len(steps), dtype=np.float64), steps[metric.key].to_numpy(np.float64)
    alt = f"{metric.title} by step: {number(float(values[0]))} to {number(float(values[-1]))}."
    chart = line_chart([Line("this run", at, values)], axis_for("step", [at]), axis_for(metric.unit, [values]), alt)
    numbers = steps[["iteration", "minibatch", "pairs", metric.key]]
    return Figure(metric.title, chart, f"{metric.caption}.", numbers)


def equal_curves(drawn: Sequence[tuple[Curves, str]]) -> str:
    """Return which curves have the same values, so that one hides the other; "" if none do."""
    groups: dict[tuple[bytes, bytes], list[str]] = {}
    for curve, metric in drawn:
        at, values, _, _ = _columns(curve.frame, metric)
        if len(at):
            groups.setdefault((at.tobytes(), values.tobytes()), []).append(curve.name)
    same = [" and ".join(f"`{name}`" for name in names) for names in groups.values() if len(names) > 1]
    return "; ".join(f"the same line: {names}" for names in same)


def curve_chart(
    title: str,
    unit: str,
    drawn: Sequence[tuple[Curves, str]],
    forked_at: int | None = None,
    has_legend: bool = True,
) -> str:
    """Return a chart with one metric of each curve, "" if no curve has its metric.

    Args:
        drawn: each curve, and its metric; the colour is the index.
        forked_at: the iteration that a dotted line marks.
        has_legend: whether the chart names its lines.
    """
    lines = []
    for colour, (curve, metric) in enumerate(drawn):
        at, values, low, high = _columns(curve.frame, metric)
        parts = tuple(_columns(frame, metric)[:2] for frame in curve.seeds)
        if len(at):
            lines.append(Line(curve.name, at, values, low, high, colour, parts, curve.tooltip))
    if not lines:
        return ""
    ends = "; ".join(f"{line.name}: {number(float(line.y[0]))} to {number(float(line.y[-1]))}" for line in lines)
    ranges = [values for line in lines for values in (line.y, line.low, line.high)]
    x = axis_for("iteration", [line.x for line in lines])
    rules = () if forked_at is None else (Rule(forked_at, "forked here", along="x"),)
    return line_chart(lines, x, axis_for(unit, ranges), f"{title} by iteration. {ends}.", rules, has_legend)


def run_chart(facts: Facts, curves: pd.DataFrame) -> str:
    """Return the chart of the first screen from a run's frame of curves."""
    lines = facts.content.first_chart
    drawn, unit = [(Curves(line.label, curves), line.key) for line in lines], lines[-1].title
    return curve_chart(unit.capitalize(), unit, drawn, facts.forked_at)


def main_chart(facts: Facts, curves: Sequence[Curves]) -> str:
    """Return a chart with the evaluated curve of each run, or with the sampled curve if nothing was evaluated."""
    for line in facts.content.first_chart:
        if any((curve.frame["metric"] == line.key).any() for curve in curves):
            return curve_chart(line.title.capitalize(), line.title, [(curve, line.key) for curve in curves])
    return ""


def curve_sections(facts: Facts, lines: Sequence[Curves], notes: Sequence[str], band: str) -> list[Section]:
    """Return the sections Learning and Optimisation: figures of `lines` below `notes`; `band` explains the bands."""
    content, names = facts.content, legend([line.name for line in lines])
    return [
        Section("learning", "Learning", notes, metric_figures(content.learning, lines, band), legend=names),
        Section("optimisation", "Optimisation", notes, metric_figures(content.optimisation, lines, band), legend=names),
    ]


def _columns(frame: pd.DataFrame, metric: str) -> tuple[Floats, Floats, Floats, Floats]:
    """Return iteration, value, low and high of one metric."""
    rows = _rows(frame, metric)
    x, y, low, high = (rows[name].to_numpy(np.float64) for name in ("iteration", "value", "low", "high"))
    return x, y, low, high
