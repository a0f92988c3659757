"""Figures of the sampler-trainer mismatch: delta = old_logprobs - rollout_logprobs, nats."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.pairs.places import LAG, ROUTE, ROUTES, TURN
from analysis.report.drawing.axes import Axis, axis_for
from analysis.report.drawing.charts import Line, bar_chart, heat_map, line_chart
from analysis.report.drawing.figure import Figure
from analysis.report.drawing.markup import number, share
from analysis.report.figures import counts
from analysis.report.figures.counts import Counts

Floats = npt.NDArray[np.float64]


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
        "(log scale); on the line both agree. The test for equal bits is in the summary."
    )
    return Figure(
        "Probability, sampler and trainer", chart, caption, fullest_cells(edges, edges, grid, "sampler", "trainer")
    )


def delta_figure(counted: Counts) -> Figure:
    """Histogram of delta on a symmetric logarithmic scale; `found` counts in `counts.DELTA_EDGES`."""
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
    chart = bar_chart(bin_edges[:-1], bin_edges[1:], [("tokens", counted.astype(np.float64))], x, y, about)
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
    bar_edges = np.arange(len(filled), dtype=np.float64)
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
    chart = bar_chart(bar_edges, bar_edges + 1.0, list(values.items()), x, y, about)
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


def _short(value: float) -> str:
    """A short label, such as 0.01 or 1e-4."""
    return f"{value:g}" if value == 0 or value >= 1e-3 else f"{value:.0e}".replace("e-0", "e-")


def fullest_cells(x: Floats, y: Floats, grid: Counts, x_name: str, y_name: str) -> pd.DataFrame:
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
