"""Learning curves: one value per iteration and metric with an interval, of one run or over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.report.drawing.axes import axis_for
from analysis.report.drawing.charts import Line, line_chart
from analysis.report.drawing.figure import Figure
from analysis.report.drawing.markup import number
from analysis.report.figures import metrics
from analysis.report.figures.metrics import Metric

Floats = npt.NDArray[np.float64]


def mean_and_error(values: Floats) -> tuple[float, float]:
    """Mean and standard error s / sqrt(n) of independent values, s with n - 1; the error of one value is NaN."""
    count = len(values)
    error = float(values.std(ddof=1) / np.sqrt(count)) if count > 1 else np.nan
    return float(values.mean()), error


def ratio_and_error(sums: Floats, counts: Floats) -> tuple[float, float]:
    """sum(sums) / sum(counts), and the standard error of that ratio over clusters (responses).

    error^2 = n / (n - 1) * sum((s_i - r c_i)^2) / (sum c_i)^2.
    """
    count, total = len(sums), float(counts.sum())
    ratio = float(sums.sum()) / total
    if count < 2:
        return ratio, np.nan
    return ratio, float(np.sqrt(count / (count - 1) * np.square(sums - ratio * counts).sum()) / total)


def sampled_rows(iteration: int, sequences: pd.DataFrame, tokens: pd.DataFrame) -> list[dict[str, float | str]]:
    """iteration, metric, value, low, high: the metrics that come from the sampled responses of one iteration."""
    owner = tokens["sequence"].to_numpy(np.int64)
    lengths = sequences["response_length"].to_numpy(np.float64)

    def per_sequence(name: str) -> Floats:
        return np.asarray(np.bincount(owner, tokens[name].to_numpy(np.float64), len(sequences)), dtype=np.float64)

    estimates = {
        "score": mean_and_error(sequences["scores"].to_numpy(np.float64)),
        "accuracy": mean_and_error(sequences["is_correct"].to_numpy(np.float64)),
        "ref_kl_per_sequence": mean_and_error(per_sequence("ref_kl")),
        "entropy": ratio_and_error(per_sequence("entropies"), lengths),
        "response_length": mean_and_error(lengths),
    }
    return [
        {"iteration": iteration, "metric": name, "value": mean, "low": mean - error, "high": mean + error}
        for name, (mean, error) in estimates.items()
    ]


def recorded_rows(
    iterations: pd.DataFrame,
    steps: pd.DataFrame,
    final: Mapping[str, float | int | str],
    of_iterations: Sequence[str] = metrics.OF_ITERATIONS,
    of_steps: Sequence[str] = metrics.OF_STEPS,
) -> pd.DataFrame:
    """The same columns for metrics of the iterations and steps tables; low and high are NaN where there is no band.

    A metric that is among the `final` results has a point of its own behind the last iteration: the evaluation after
    the last update.
    """
    tables = []
    for name in of_iterations:
        rows = iterations.loc[iterations[name].notna(), ["iteration", name]].rename(columns={name: "value"})
        if name in final and not math.isnan(float(final[name])):
            rows.loc[len(iterations)] = [len(iterations), float(final[name])]
        tables.append(rows.assign(metric=name, low=np.nan, high=np.nan))
    for name in of_steps:
        grouped = steps.groupby("iteration", as_index=False)[name].agg(value="mean", low="min", high="max")
        tables.append(grouped[grouped["value"].notna()].assign(metric=name))
    filled = [table for table in tables if len(table)]
    columns = ["iteration", "metric", "value", "low", "high"]
    return pd.concat(filled, ignore_index=True)[columns] if filled else pd.DataFrame(columns=columns)


def episode_rows(iteration: int, returns: Floats) -> list[dict[str, float | str]]:
    """The same for the returns of the episodes that ended in an iteration of a control run; none where none did."""
    if not len(returns):
        return []
    mean, error = mean_and_error(returns)
    return [
        {"iteration": iteration, "metric": "episode_return", "value": mean, "low": mean - error, "high": mean + error}
    ]


def over_seeds(curves: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The curves of several seeds as one: mean over the seeds that have the iteration, ± one standard error."""
    joined = pd.concat(curves, ignore_index=True)
    grouped = joined.groupby(["metric", "iteration"], as_index=False)["value"].agg(["mean", "sem", "size"])
    means = grouped.rename(columns={"mean": "value", "size": "seeds"})
    means["low"], means["high"] = means["value"] - means["sem"], means["value"] + means["sem"]
    return means[["iteration", "metric", "value", "low", "high", "seeds"]]


def metric_figures(
    wanted: Sequence[Metric], curves: Sequence[tuple[str, pd.DataFrame]], band: str = ""
) -> tuple[Figure, ...]:
    """One figure per metric, one line per named curve (a run, or a cell of a grid); `band` says what bands are."""
    figures = []
    for metric in wanted:
        lines = [(name, frame[frame["metric"] == metric.key].sort_values("iteration")) for name, frame in curves]
        lines = [(name, frame) for name, frame in lines if len(frame)]
        if lines:
            reading = f"{metric.caption.partition(';')[0].rstrip('.')}; {band}" if band else metric.caption
            figures.append(_figure(metric.title, metric.unit, reading, lines))
    return tuple(figures)


def _figure(title: str, unit: str, caption: str, lines: Sequence[tuple[str, pd.DataFrame]]) -> Figure:
    def column(frame: pd.DataFrame, name: str) -> Floats:
        return frame[name].to_numpy(np.float64)

    curves = []
    for name, frame in lines:
        low, high = column(frame, "low"), column(frame, "high")
        curves.append(Line(name, column(frame, "iteration"), column(frame, "value"), low, high))
    ranges = [column(frame, name) for _, frame in lines for name in ("value", "low", "high")]
    x = axis_for("iteration", [line.x for line in curves])
    ends = [f"{line.name}: {number(line.y[0])} to {number(line.y[-1])}" for line in curves]
    chart = line_chart(curves, x, axis_for(unit, ranges), f"{title} by iteration. {'; '.join(ends)}.")
    numbers = [frame.drop(columns="metric").assign(line=name) for name, frame in lines]
    joined = pd.concat(numbers, ignore_index=True)
    return Figure(title, chart, caption, joined if len(lines) > 1 else joined.drop(columns="line"))
