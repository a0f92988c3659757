"""Compute and draw curves over the iterations, of one run or over seeds, with their intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from ppo_repro.analysis.report.charts import Line, Rule, axis_for, line_chart
from ppo_repro.analysis.report.markup import number
from ppo_repro.analysis.report.page import Figure
from ppo_repro.analysis.stats import clusters
from ppo_repro.analysis.stats.clusters import Floats
from ppo_repro.analysis.stats.significance import one_sample, t_interval
from ppo_repro.config.run import RunConfig


@dataclass(frozen=True)
class Metric:
    """Title and unit of a curve over the iterations; `key` is its name in the frames of curves.

    `source` is the recorded table with the column `key`; the rows of a metric of `samples` are computed.
    """

    key: str
    source: Literal["samples", "iterations", "steps"]
    title: str
    unit: str
    caption: str


@dataclass(frozen=True)
class Curve:
    """Source of one line in every chart of a page: a run, or a setting with several seeds.

    `frame` has all metrics: iteration, metric, value, low, high. `seeds` are the frames of single runs, which the
    charts draw as thin lines. `about` is a longer text than `name`.
    """

    name: str
    frame: pd.DataFrame
    seeds: tuple[pd.DataFrame, ...] = ()
    about: str = ""


_STEPS = "mean over the steps, band: smallest to largest step"
_EXPLAINED_VARIANCE = Metric(
    "explained_variance", "iterations", "Explained variance", "share",
    "1 - Var(returns - values) / Var(returns) before the update: 1 where values predict every return, 0 where they do "
    "no better than their mean.",
)  # fmt: skip
_LOSSES = (
    Metric(
        "policy_loss", "steps", "Loss of the policy", "loss",
        f"All terms; {_STEPS}. It is near 0: no measure of progress.",
    ),
    Metric(
        "value_loss", "steps", "Loss of the value model", "loss", f"Half the squared error of the values; {_STEPS}.",
    ),
    Metric(
        "approx_kl", "steps", "Step size, KL(anchor || new)", "nats",
        f"How far the policy has moved from the one that sampled, by k3; {_STEPS}.",
    ),
    Metric(
        "clip_fraction", "steps", "Clip fraction", "share", f"Tokens whose policy gradient the clip removed; {_STEPS}.",
    ),
)  # fmt: skip
_LEARNING_RATE = Metric("learning_rate", "steps", "Learning rate", "per step", "Learning rate of the policy.")
# a metric that a run does not have is left out
LEARNING = (
    Metric("score", "samples", "Score", "score", "Mean score of the sampled responses; band: ± one standard error."),
    Metric(
        "accuracy", "samples", "Accuracy, sampled", "share",
        "Share of correct sampled responses; band: ± one standard error.",
    ),
    Metric(
        "eval_accuracy", "iterations", "Accuracy, held out", "share",
        "Greedy, before the update; the last point is at the end.",
    ),
    Metric(
        "eval_score", "iterations", "Score, held out", "score",
        "Greedy, before the update; the last point is at the end.",
    ),
    Metric(
        "ref_kl_per_sequence", "samples", "KL to the reference", "nats per response",
        "KL(policy || reference), exact over the vocabulary, mean over the responses; band: ± one standard error.",
    ),
    Metric("entropy", "samples", "Entropy", "nats", "Entropy of the policy before the update, mean over all tokens."),
    Metric(
        "response_length", "samples", "Response length", "tokens",
        "Mean over the responses; band: ± one standard error.",
    ),
    _EXPLAINED_VARIANCE,
)  # fmt: skip
OPTIMISATION = (
    *_LOSSES,
    Metric(
        "grad_norm", "steps", "Gradient norm", "norm",
        f"Global norm of the policy's gradient before clipping; {_STEPS}.",
    ),
    Metric(
        "value_grad_norm", "steps", "Gradient norm, value model", "norm", f"Its global norm before clipping; {_STEPS}.",
    ),
    _LEARNING_RATE,
    Metric("clip_range", "iterations", "Clip range", "ratio", "Adaptive clip range of the ratio."),
    Metric("kl_coef", "iterations", "KL coefficient", "coefficient", "Weight of the KL to the reference."),
    Metric("penalty_coef", "iterations", "Penalty coefficient", "coefficient", "Weight of KL(anchor || new)."),
)  # fmt: skip
CONTROL_LEARNING = (
    Metric(
        "episode_return", "samples", "Return of training episodes", "return",
        "Mean return of the episodes that ended in the iteration; band: ± one standard error.",
    ),
    Metric(
        "eval_return", "iterations", "Return, likeliest actions", "return",
        "Mean return of whole episodes before the update; the last point is at the end.",
    ),
    Metric("entropy", "iterations", "Entropy", "nats", "Entropy of the policy before the update, mean over all steps."),
    _EXPLAINED_VARIANCE,
)  # fmt: skip
CONTROL_OPTIMISATION = (
    *_LOSSES,
    Metric(
        "joint_grad_norm", "steps", "Gradient norm", "norm",
        f"Global norm over actor and critic before clipping; {_STEPS}.",
    ),
    _LEARNING_RATE,
    Metric("clip_range", "steps", "Clip range", "ratio", "Clip range of the ratio."),
)  # fmt: skip
DPO_LEARNING = (
    Metric("eval_pair_accuracy", "iterations", "Held-out pairs in the right order", "share", "After each epoch."),
    Metric("eval_margin", "iterations", "Margin of held-out pairs", "reward", "Mean after each epoch."),
    Metric("margin", "iterations", "Margin of training pairs", "reward", "Mean after each epoch."),
    Metric(
        "eval_accuracy", "iterations", "Accuracy, held out", "share",
        "Greedy accuracy on held-out prompts, before and after.",
    ),
)  # fmt: skip
DPO_OPTIMISATION = (
    Metric("loss", "steps", "Loss", "nats", f"DPO loss of a minibatch's pairs; {_STEPS}."),
    Metric("grad_norm", "steps", "Gradient norm", "norm", f"Global norm before clipping; {_STEPS}."),
)


def sampled_rows(iteration: int, sequences: pd.DataFrame, tokens: pd.DataFrame) -> list[dict[str, float | str]]:
    """Return the metrics of the sampled responses of one iteration, as rows iteration, metric, value, low, high."""
    owner = tokens["sequence"].to_numpy(np.int64)
    lengths = sequences["response_length"].to_numpy(np.float64)

    def per_sequence(name: str) -> Floats:
        return np.asarray(np.bincount(owner, tokens[name].to_numpy(np.float64), len(sequences)), dtype=np.float64)

    estimates = {
        "score": clusters.mean(sequences["scores"].to_numpy(np.float64)),
        "accuracy": clusters.mean(sequences["is_correct"].to_numpy(np.float64)),
        "ref_kl_per_sequence": clusters.mean(per_sequence("ref_kl")),
        "entropy": clusters.ratio_of_sums(per_sequence("entropies"), lengths),
        "response_length": clusters.mean(lengths),
    }
    return [
        {"iteration": iteration, "metric": name, "value": mean, "low": mean - error, "high": mean + error}
        for name, (mean, error) in estimates.items()
    ]


def recorded_rows(
    iterations: pd.DataFrame,
    steps: pd.DataFrame,
    final: Mapping[str, float | int | str],
    metrics: Sequence[Metric],
) -> pd.DataFrame:
    """Return the metrics of the tables `iterations` and `steps`, as rows iteration, metric, value, low, high.

    Args:
        iterations: the table `iterations`; low and high of its metrics are NaN.
        steps: the table `steps`; low and high are the smallest and largest step of the iteration.
        final: the final results; a metric of `iterations` in them has a point after the last iteration.
        metrics: metrics of any source.
    """
    tables = []
    for name in (metric.key for metric in metrics if metric.source == "iterations"):
        rows = iterations.loc[iterations[name].notna(), ["iteration", name]].rename(columns={name: "value"})
        if name in final and not math.isnan(float(final[name])):
            rows.loc[len(iterations)] = [len(iterations), float(final[name])]
        tables.append(rows.assign(metric=name, low=np.nan, high=np.nan))
    for name in (metric.key for metric in metrics if metric.source == "steps"):
        grouped = steps.groupby("iteration", as_index=False)[name].agg(value="mean", low="min", high="max")
        tables.append(grouped[grouped["value"].notna()].assign(metric=name))
    filled = [table for table in tables if len(table)]
    columns = ["iteration", "metric", "value", "low", "high"]
    return pd.concat(filled, ignore_index=True)[columns] if filled else pd.DataFrame(columns=columns)


def control_curves(
    iterations: pd.DataFrame, steps: pd.DataFrame, final: Mapping[str, float | int | str], returns: Mapping[int, Floats]
) -> pd.DataFrame:
    """Return every metric of a control run, as rows iteration, metric, value, low, high.

    `returns` has the returns of the ended episodes by iteration.
    """
    rows = []
    for iteration, found in returns.items():
        mean, error = clusters.mean(found)
        rows.append((iteration, "episode_return", mean, mean - error, mean + error))
    recorded = recorded_rows(iterations, steps, final, CONTROL_LEARNING + CONTROL_OPTIMISATION)
    columns = ["iteration", "metric", "value", "low", "high"]
    return pd.concat([pd.DataFrame(rows, columns=columns), recorded], ignore_index=True) if rows else recorded


def over_seeds(runs: Sequence[pd.DataFrame], score: tuple[float, float]) -> pd.DataFrame:
    """Return the mean over seeds as a frame of curves; an iteration's mean is over the seeds that have the iteration.

    low and high are the 95 % Student interval, clipped to the possible values. For fewer than MANY_SEEDS seeds, low and
    high are the smallest and largest value, because an interval says little. `score` is the possible range of scores.
    """
    ranges = RANGES | dict.fromkeys(("score", "eval_score"), score)
    rows = []
    for (metric, iteration), group in pd.concat(runs).groupby(["metric", "iteration"]):
        values = group["value"].to_numpy(np.float64)
        values = values[np.isfinite(values)]
        if len(values):
            estimate, possible = one_sample(values), ranges.get(str(metric), ANY)
            ends = (values.min(), values.max()) if len(runs) < MANY_SEEDS else t_interval(estimate, 0.95)
            rows.append((iteration, metric, estimate.mean, *np.clip(ends, *possible), len(values)))
    return pd.DataFrame(rows, columns=["iteration", "metric", "value", "low", "high", "seeds"])


def score_range(config: RunConfig) -> tuple[float, float]:
    """Return the smallest and largest score that the reward terms can give; infinite if a term has no limit."""
    low, high = -config.reward.missing_eos_penalty, 0.0
    for term in config.reward.terms:
        largest = LARGEST.get(term.kind, math.inf)
        smallest = 0.0 if term.kind in LARGEST else -math.inf
        ends = sorted((term.weight * smallest, term.weight * largest)) if term.weight else (0.0, 0.0)
        low, high = low + ends[0], high + ends[1]
    return low, high


# charts show fewer seeds one by one
MANY_SEEDS = 5
# possible values of metrics; then the largest score of a reward term whose smallest score is 0
ANY, SHARE, POSITIVE = (-math.inf, math.inf), (0.0, 1.0), (0.0, math.inf)
RANGES = {
    **dict.fromkeys(("accuracy", "eval_accuracy", "eval_pair_accuracy", "clip_fraction"), SHARE),
    **dict.fromkeys(("ref_kl_per_sequence", "entropy", "response_length", "value_loss", "approx_kl"), POSITIVE),
    **dict.fromkeys(("grad_norm", "joint_grad_norm", "value_grad_norm", "learning_rate"), POSITIVE),
    **dict.fromkeys(("clip_range", "kl_coef", "penalty_coef"), POSITIVE),
    "explained_variance": (-math.inf, 1.0),
    "loss": POSITIVE,
}
LARGEST = {"exact_match": 1.0, "steps": 1.0, "format": 2.0}
# a metric that equals its twin has no figure, and a setting that changes in no curve has none either
TWINS = {"accuracy": "score", "eval_accuracy": "eval_score"}
SETTINGS = ("learning_rate", "clip_range", "kl_coef", "penalty_coef")
ACCURACIES = tuple(TWINS)


def _rows(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    return frame[frame["metric"] == metric].sort_values("iteration")


def telling(wanted: Sequence[Metric], curves: Sequence[Curve]) -> list[Metric]:
    """Return the metrics that tell something: no accuracy that is the score, no setting that stays constant."""
    return [metric for metric in wanted if _says_something(metric.key, curves)]


def _says_something(metric: str, curves: Sequence[Curve]) -> bool:
    values, twins = (
        [curve.frame.loc[curve.frame["metric"] == name, "value"].to_numpy(np.float64) for curve in curves]
        for name in (metric, TWINS.get(metric))
    )
    if metric in SETTINGS:
        return any(len(np.unique(found)) > 1 for found in values)
    return not all(map(np.array_equal, values, twins))


def metric_figures(
    wanted: Sequence[Metric], curves: Sequence[Curve], band: str = "", forked_at: int | None = None
) -> list[Figure]:
    """Return one figure per metric, with a line for each curve that has the metric.

    Args:
        wanted: the metrics.
        curves: the curves; each has one colour in all figures.
        band: a sentence about the bands.
        forked_at: the iteration that a dotted line marks.
    """
    figures = []
    for metric in telling(wanted, curves):
        found = [(curve.name, rows) for curve in curves if len(rows := _rows(curve.frame, metric.key))]
        if found:
            caption = f"{metric.caption.partition(';')[0].rstrip('.')}; {band}" if band else metric.caption
            numbers = pd.concat([frame.drop(columns="metric").assign(line=name) for name, frame in found])
            numbers = numbers.reset_index(drop=True) if len(found) > 1 else numbers.drop(columns="line")
            chart = curve_chart(metric.title, metric.unit, [(curve, metric.key) for curve in curves], forked_at)
            figures.append(Figure(metric.title, chart, caption, numbers))
    return figures


def curve_chart(title: str, unit: str, drawn: Sequence[tuple[Curve, str]], forked_at: int | None = None) -> str:
    """Return a chart with one metric of each curve, "" if no curve has its metric.

    Args:
        title: the title of the metric.
        unit: the unit of the y axis.
        drawn: each curve, and its metric; the colour is the index.
        forked_at: the iteration that a dotted line marks.
    """
    lines = []
    for colour, (curve, metric) in enumerate(drawn):
        at, values, low, high = _columns(curve.frame, metric)
        parts = tuple(_columns(frame, metric)[:2] for frame in curve.seeds)
        if len(at):
            lines.append(Line(curve.name, at, values, low, high, colour, parts, curve.about))
    if not lines:
        return ""
    ends = "; ".join(f"{line.name}: {number(float(line.y[0]))} to {number(float(line.y[-1]))}" for line in lines)
    ranges = [values for line in lines for values in (line.y, line.low, line.high)]
    x = axis_for("iteration", [line.x for line in lines])
    rules = () if forked_at is None else (Rule(forked_at, "forked here", along="x"),)
    return line_chart(lines, x, axis_for(unit, ranges), f"{title} by iteration. {ends}.", rules)


def _columns(frame: pd.DataFrame, metric: str) -> tuple[Floats, Floats, Floats, Floats]:
    """Return iteration, value, low and high of one metric."""
    rows = _rows(frame, metric)
    x, y, low, high = (rows[name].to_numpy(np.float64) for name in ("iteration", "value", "low", "high"))
    return x, y, low, high
