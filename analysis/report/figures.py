"""The figures of a run's page: mismatch, clipping, text, scores. Each takes counts or a table and returns a chart.

delta = old_logprobs - rollout_logprobs, nats; ratio = exp(new_logprobs - anchor), as recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.pairs.places import LAG, ROUTE, ROUTES, TURN
from analysis.report import counts
from analysis.report.charts import Axis, Line, Rule, area_chart, axis_for, bar_chart, heat_map, line_chart
from analysis.report.counts import Counts
from analysis.report.markup import number, share
from analysis.report.page import Figure

Floats = npt.NDArray[np.float64]
FLAG_WORDS = {
    "clip_high": "clipped high", "clip_low": "clipped low", "clip_dual": "clipped dual",
    "clip_cov": "drawn by Clip-Cov", "wrong_high": "wrong side, high", "wrong_low": "wrong side, low",
    "bound_high": "weight bounded above", "bound_low": "weight bounded below", "kl_cov": "penalised by KL-Cov",
}  # fmt: skip
MAX_VALUES = 12  # up to so many different values each has a bar of its own
BINS = 24


@dataclass(frozen=True)
class ClipBounds:
    """The bounds of the ratio in the last iteration; `adaptive` if other iterations had other bounds."""

    low: float
    high: float
    adaptive: bool = False

    def rules(self, log: bool) -> tuple[Rule, Rule]:
        """Both bounds as lines, at the ratio or at its logarithm."""
        low, high = (float(np.log(bound)) if log else bound for bound in (self.low, self.high))
        return Rule(low, f"bounds {self.low:g} and {self.high:g}"), Rule(high)


def probability_figure(grid: Counts) -> Figure:
    """Two-dimensional histogram of the probabilities; `grid` from `counts.probability_grid`."""
    edges = counts.PROBABILITY_EDGES
    x = Axis("probability under the sampler", 1e-6, 1.0, True)
    y = Axis("probability under the trainer", 1e-6, 1.0, True)
    total, diagonal = int(grid.sum()), int(np.trace(grid))
    about = (
        f"Tokens by probability under the sampler and under the trainer. {share(diagonal, total)} of {total:,} tokens "
        "are in the same bin of both."
    )
    chart = heat_map(edges, edges, grid, x, y, about, diagonal=True)
    caption = (
        "Every response token, six bins per decade, probabilities below 1e-6 in the first bin; stronger is more tokens "
        "(log scale); on the line both agree."
    )
    numbers = _fullest(edges, edges, grid, "sampler", "trainer")
    return Figure("Probability, sampler and trainer", chart, caption, numbers)


def delta_figure(counted: Counts) -> Figure:
    """Histogram of delta on a symmetric logarithmic scale; `counted` in bins of `counts.DELTA_EDGES`."""
    edges = counts.DELTA_EDGES
    bin_edges = np.arange(len(edges), dtype=np.float64)
    middle = (len(edges) - 2) // 2
    per_decade = 3
    marks = [(middle + 0.5, "0")]
    for decade in range(-8, 2, 2):
        step = (decade + 9) * per_decade
        marks += [(middle - step, f"-1e{decade}"), (middle + 1.0 + step, f"1e{decade}")]
    used = np.flatnonzero(counted)
    reach = max(int(np.abs(used - middle).max()) if len(used) else 0, 4 * per_decade) + 1
    lo, hi = max(middle - reach, 0), min(middle + 1 + reach, len(edges) - 1)
    labels = tuple(sorted((at, label) for at, label in marks if lo <= at <= hi))
    x = Axis("old - rollout log-prob (nats), logarithmic both ways", float(lo), float(hi), ticks=labels)
    total, zero = int(counted.sum()), int(counted[middle])
    y = axis_for("tokens", [counted[counted > 0]], log=True, include=(1.0,))
    y = Axis(y.label, 0.5, y.hi, True, tuple((10.0**p, f"{10**p:,}") for p in range(0, 12) if 10.0**p <= y.hi))
    about = f"Histogram of the log-prob difference; {share(zero, total)} of {total:,} tokens are within 1e-9 nats of 0."
    chart = bar_chart(bin_edges, [("tokens", counted.astype(np.float64))], x, y, about)
    caption = "Middle bin: less than 1e-9 nats apart. Rounding is symmetric about 0; a shift to one side is a bias."
    numbers = pd.DataFrame({"from (nats)": edges[:-1][used], "to (nats)": edges[1:][used], "tokens": counted[used]})
    return Figure("Log-prob difference", chart, caption, numbers)


# by kind of bucket: title, what the axis shows, caption
BUCKETS = {
    "prob": (
        "Difference by probability", "probability under the sampler",
        "Rounding moves the log-probs of rare tokens most: the error goes with 1 - p.",
    ),
    "position": (
        "Difference by position", "position in the response (tokens)",
        "An error that accumulates through the cache would grow with position.",
    ),
    LAG: (
        "Difference by lag", "iterations that the weights of the sampler were behind",
        "Tokens without a lag differ by what else there is.",
    ),
    TURN: (
        "Difference by turn", "turn of the model", "What the environment said before is the same on both sides.",
    ),
    ROUTE: (
        "Difference by route", "experts in sampler and trainer",
        "A flip: other experts compute the token in the trainer. After one, a token sees another past.",
    ),
}  # fmt: skip


def bucket_figure(buckets: pd.DataFrame, kind: str) -> Figure:
    """|delta| by bucket of `kind`, a key of BUCKETS: mean, 99th percentile and largest.

    `buckets` has columns kind, lo, hi, n, abs_mean, abs_p99, abs_max (nats), one row per bucket.
    """
    filled = buckets[(buckets["kind"] == kind) & (buckets["n"] > 0)].sort_values("lo", ignore_index=True)
    columns = {"largest": "abs_max", "99th percentile": "abs_p99", "mean": "abs_mean"}
    values = {name: filled[column].to_numpy(np.float64) for name, column in columns.items()}
    # the axis begins below the smallest value, or its bar would have no height
    above_zero = [value[value > 0] / 2 for value in values.values()]
    y = axis_for("|old - rollout| (nats)", [*values.values(), *above_zero], log=True)
    ends = [_short(value) for value in [*filled["lo"], filled["hi"].iloc[-1]]]
    every = max(1, len(ends) // 8)
    marks = tuple((float(k), end) for k, end in enumerate(ends) if k % every == 0)
    if kind == ROUTE:
        marks = tuple((k + 0.5, ROUTES[int(route)]) for k, route in enumerate(filled["lo"]))
    title, words, caption = BUCKETS[kind]
    x = Axis(words, 0.0, float(len(filled)), ticks=marks)
    about = (
        f"Mean |difference| by {words}: {number(values['mean'][0])} nats in the first bucket, "
        f"{number(values['mean'][-1])} in the last."
    )
    names = [f"{words} {lo} to {hi}" for lo, hi in pairwise(ends)]
    chart = bar_chart(np.arange(len(filled) + 1, dtype=np.float64), list(values.items()), x, y, about, names)
    return Figure(title, chart, caption, filled[["lo", "hi", "n", "abs_mean", "abs_p99", "abs_max"]])


def divergence_figure(divergences: pd.DataFrame) -> Figure:
    """|k1|, k2 and k3 over the iterations with their standard errors.

    `divergences` has columns iteration, metric (k1, k2 or k3, nats, token_mean), value, se.
    """
    lines = []
    for metric in ("k1", "k2", "k3"):
        rows = divergences[divergences["metric"] == metric].sort_values("iteration")
        value, error = (rows[name].to_numpy(np.float64) for name in ("value", "se"))
        size = np.abs(value)
        positive = size > 0  # a logarithmic scale has no zero
        low, high = np.where(size > error, size - error, np.nan), size + error
        name = "|k1|" if metric == "k1" else metric
        at = rows["iteration"].to_numpy(np.float64)
        lines.append(Line(name, at[positive], size[positive], low[positive], high[positive]))
    y = axis_for("nats per token, token_mean", [line.y for line in lines], log=True)
    x = axis_for("iteration", [line.x for line in lines])
    last = ", ".join(f"{line.name} {number(line.y[-1])}" for line in lines if len(line.y))
    chart = line_chart(lines, x, y, f"KL(sampler || trainer) by iteration; in the last one {last}.")
    caption = (
        "KL(rollout || old), token_mean, from the sampled tokens: k1 = -delta (its sign is lost here), "
        "k2 = delta^2 / 2, k3 = exp(delta) - 1 - delta; band: ± one standard error, clustered by response. "
        "Where |k1| is within its error, only k3 says something."
    )
    return Figure("KL from sampler to trainer", chart, caption, divergences)


def ratio_figure(histogram: pd.DataFrame, bounds: ClipBounds | None) -> Figure:
    """Log-ratios by step of the iteration, all iterations together, each step's column adding up to 1.

    `histogram` has columns epoch, minibatch, bin_lo, bin_hi (nats), count.
    """
    edges = counts.LOG_RATIO_EDGES
    steps = histogram[["epoch", "minibatch"]].drop_duplicates().sort_values(["epoch", "minibatch"], ignore_index=True)
    numbered = histogram.merge(steps.assign(step=np.arange(len(steps))), on=["epoch", "minibatch"])
    grid = np.zeros((len(steps), len(edges) - 1))
    bins = np.searchsorted(edges, numbered["bin_lo"].to_numpy(np.float64), side="right") - 1
    np.add.at(grid, (numbered["step"].to_numpy(), np.minimum(bins, len(edges) - 2)), numbered["count"].to_numpy())
    shares = grid / grid.sum(axis=1, keepdims=True)
    reach = _reach(edges, grid.sum(axis=0), bounds)
    inside = np.flatnonzero((edges[:-1] >= -reach - 1e-9) & (edges[1:] <= reach + 1e-9))
    visible_edges = edges[inside[0] : inside[-1] + 2]
    x = Axis("steps of an iteration, by epoch", 0.0, float(len(steps)), ticks=_epoch_ticks(steps))
    y = Axis("log ratio (nats)", -reach, reach)
    outside = _outside(grid, edges, bounds)
    about = f"Log-ratios by step of the iteration. {outside}"
    at = np.arange(len(steps) + 1, dtype=np.float64)
    names = [f"epoch {row.epoch}, minibatch {row.minibatch}" for row in steps.itertuples()]
    rules = bounds.rules(log=True) if bounds else ()
    chart = heat_map(at, visible_edges, shares[:, inside], x, y, about, rules, what="of the tokens", x_names=names)
    caption = (
        "Each column is a minibatch, all iterations together; stronger is a larger share of its tokens "
        f"(log scale). {outside} Log-ratios beyond ±2 nats are in the outermost bins."
    )
    numbers = _step_numbers(steps, grid, edges)
    return Figure("Log-ratios over the steps", chart, caption, numbers)


def flag_figure(flags: pd.DataFrame) -> Figure:
    """Disjoint clip flags as shares of the token updates of each iteration.

    `flags` has columns iteration, the flags of `counts.FLAGS` and token_updates, all counts.
    """
    total = flags["token_updates"].to_numpy(np.float64)
    rows, total = flags[total > 0], total[total > 0]
    shares = {FLAG_WORDS[flag]: rows[flag].to_numpy(np.float64) / total for flag in counts.FLAGS if rows[flag].any()}
    at = rows["iteration"].to_numpy(np.float64)
    top = float(np.sum(list(shares.values()), axis=0).max()) if shares else 1.0
    x, y = axis_for("iteration", [at]), Axis("share of token updates", 0.0, top * 1.04)
    removed = int(rows[["clip_high", "clip_low", "clip_dual", "clip_cov"]].to_numpy().sum())
    wrong = int(rows[["wrong_high", "wrong_low"]].to_numpy().sum())
    count = int(total.sum())
    summary = (
        f"Of {number(count)} token updates the clip removed the gradient of {share(removed, count)}; "
        f"{share(wrong, count)} were outside the band and kept it."
    )
    chart = area_chart(at, list(shares.items()), x, y, summary)
    caption = (
        f"{summary} Clipped high: advantage above 0 and ratio above the upper bound; clipped low: the mirror image; "
        "wrong side: outside the band, but the gradient leads back into it and is kept."
    )
    return Figure("Clip flags by iteration", chart, caption, flags)


def quadrant_figure(grid: Counts, bounds: ClipBounds | None) -> Figure:
    """Ratio against advantage, the two regions without gradient shaded; `grid` from `counts.quadrant_grid`."""
    x_edges, y_edges = counts.ADVANTAGE_EDGES, counts.RATIO_EDGES
    x = Axis("advantage", float(x_edges[0]), float(x_edges[-1]))
    marks = tuple((2.0**power, f"{2.0**power:g}") for power in (-2, -1, 0, 1, 2))
    y = Axis("ratio", float(y_edges[0]), float(y_edges[-1]), True, marks)
    total = int(grid.sum())
    under = () if bounds is None else ((0.0, 4.0, bounds.high, 4.0), (-4.0, 0.0, 0.25, bounds.low))
    about = f"{total:,} token updates by advantage and ratio."
    rules = (Rule(1.0), Rule(0.0, along="x"))
    chart = heat_map(x_edges, y_edges, grid, x, y, about, rules=rules, under=under)
    shading = "Shaded: the clip removes the gradient. " if bounds else ""
    caption = f"{shading}Stronger is more token updates (log scale); values beyond the ends are in the outermost bins."
    numbers = _fullest(x_edges, y_edges, grid, "advantage", "ratio")
    return Figure("Ratio and advantage", chart, caption, numbers)


def extremes_figure(extremes: pd.DataFrame, bounds: ClipBounds | None) -> Figure:
    """Smallest and largest ratio of each iteration against the bounds.

    `extremes` has columns iteration, min_ratio, max_ratio, nonfinite_ratios.
    """
    at = extremes["iteration"].to_numpy(np.float64)
    values = {name: extremes[name].to_numpy(np.float64) for name in ("max_ratio", "min_ratio")}
    lines = [Line(name.replace("_ratio", "imum"), at, value) for name, value in values.items()]
    include = (bounds.low, bounds.high) if bounds else (1.0,)
    y = axis_for("ratio", list(values.values()), log=True, include=include)
    largest = float(np.nanmax(values["max_ratio"])) if np.isfinite(values["max_ratio"]).any() else np.nan
    summary = f"Largest ratio of all: {number(largest)}."
    rules = bounds.rules(log=False) if bounds else ()
    chart = line_chart(lines, axis_for("iteration", [at]), y, f"Extreme ratios by iteration. {summary}", rules)
    caption = (
        f"{summary} Clipping removes a token's gradient; it does not bound its ratio, which other tokens still move."
    )
    return Figure("Extreme ratios", chart, caption, extremes)


def distribution_figure(title: str, groups: Mapping[str, Floats], name: str, of: str, caption: str) -> Figure:
    """How the finite values of each group are distributed, as bars in percent, side by side.

    `name` is what the values are, such as `score`, `of` what has one, such as `responses`.
    """
    finite = {group: values[np.isfinite(values)] for group, values in groups.items()}
    everything = np.concatenate([*finite.values()])
    distinct = np.unique(everything)
    if len(distinct) <= MAX_VALUES:
        edges: Floats = np.arange(len(distinct) + 1, dtype=np.float64)
        words = [number(float(value), 3) for value in distinct]
        marks = tuple((k + 0.5, word) for k, word in enumerate(words))
        counted = {group: np.searchsorted(distinct, values) for group, values in finite.items()}
    else:
        edges, marks = np.linspace(everything.min(), everything.max(), BINS + 1), ()
        words = [f"{lo} to {hi}" for lo, hi in pairwise(number(float(edge)) for edge in edges)]
        # the last bin holds its upper end too
        counted = {g: np.clip(np.searchsorted(edges, v, side="right") - 1, 0, BINS - 1) for g, v in finite.items()}
    counts_of = {group: np.bincount(bins, minlength=len(words)) for group, bins in counted.items() if len(bins)}
    shares = [(group, 100.0 * found / found.sum()) for group, found in counts_of.items()]
    y = axis_for(f"% of the {of}", [values for _, values in shares], include=(0.0,))
    about = "; ".join(
        f"{group}: most often {name} {words[int(values.argmax())]} ({number(float(values.max()), 3)} %)"
        for group, values in shares
    )
    x = Axis(name, float(edges[0]), float(edges[-1]), ticks=marks)
    chart = bar_chart(edges, shares, x, y, about, [f"{name} {word}" for word in words])
    return Figure(title, chart, caption, pd.DataFrame({name: words, **counts_of}))


def change_figures(values: Mapping[int, Floats], name: str, of: str) -> list[Figure]:
    """The distribution in the first and in the last iteration that has a finite value; none if no iteration has."""
    filled = sorted(iteration for iteration, found in values.items() if np.isfinite(found).any())
    if not filled:
        return []
    groups = {f"iteration {i}": values[i] for i in (filled[0], filled[-1])}
    caption = f"Share of the {of} with each {name}, first and last iteration."
    return [distribution_figure(f"Distribution of the {name}", groups, name, of, caption)]


def _short(value: float) -> str:
    """A short label, such as 0.01 or 1e-4."""
    return f"{value:g}" if value == 0 or value >= 1e-3 else f"{value:.0e}".replace("e-0", "e-")


def _fullest(x: Floats, y: Floats, grid: Counts, x_name: str, y_name: str) -> pd.DataFrame:
    """At most 60 cells with the most tokens, the fullest first."""
    i, j = np.nonzero(grid)
    order = np.argsort(-grid[i, j], kind="stable")[:60]
    i, j = i[order], j[order]
    return pd.DataFrame(
        {
            f"{x_name} from": x[i], f"{x_name} to": x[i + 1],
            f"{y_name} from": y[j], f"{y_name} to": y[j + 1], "tokens": grid[i, j],
        }
    )  # fmt: skip


def _reach(edges: Floats, filled: Floats, bounds: ClipBounds | None) -> float:
    """Half the height of the plot: up to the last bin with tokens, and beyond the bounds."""
    used = np.flatnonzero(filled)
    far = float(max(-edges[used[0]], edges[used[-1] + 1])) if len(used) else 0.0
    near = float(max(-np.log(bounds.low), np.log(bounds.high))) if bounds else 0.0
    width = float(edges[1] - edges[0])
    return min(float(edges[-1]), float(np.ceil(max(far, near + 0.05) / width - 1e-9)) * width)


def _step_numbers(steps: pd.DataFrame, grid: Floats, edges: Floats) -> pd.DataFrame:
    """Tokens of each step, and the log-ratios (bin edges) between which the middle 98 % of them lie."""
    cumulative = np.cumsum(grid, axis=1) / grid.sum(axis=1, keepdims=True)
    low, high = (cumulative < 0.01).sum(axis=1), (cumulative < 0.99).sum(axis=1)
    columns = {
        "tokens": grid.sum(axis=1).astype(np.int64),
        "1 % below (nats)": edges[low + 1],
        "99 % below": edges[high + 1],
    }
    return steps.assign(**columns)


def _outside(grid: Floats, edges: Floats, bounds: ClipBounds | None) -> str:
    if bounds is None:
        return "The objective has no clip bounds."
    middle = (edges[:-1] + edges[1:]) / 2
    # by whole bins; the recorded flags have the exact number
    beyond = (middle < np.log(bounds.low)) | (middle > np.log(bounds.high))
    total = float(grid.sum())
    moved = " in the last iteration (they adapt)" if bounds.adaptive else ""
    return f"About {100 * float(grid[:, beyond].sum()) / total:.2g} % lie outside the bounds{moved}."


def _epoch_ticks(steps: pd.DataFrame) -> tuple[tuple[float, str], ...]:
    """The beginning of each epoch, at most eight of them; of a single epoch its minibatches."""
    epochs = steps["epoch"].to_numpy()
    starts = np.flatnonzero(np.diff(epochs, prepend=-1))
    if len(starts) == 1:
        return tuple((k + 0.5, str(k)) for k in range(0, len(steps), max(1, len(steps) // 8)))
    return tuple((float(k), f"epoch {epochs[k]}") for k in starts[:: max(1, len(starts) // 4)])
