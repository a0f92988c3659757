"""Figures of clipping: recorded ratios = exp(new_logprobs - anchor) and recorded clip flags."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.report.drawing.axes import Axis, axis_for
from analysis.report.drawing.charts import Line, Rule, area_chart, heat_map, line_chart
from analysis.report.drawing.figure import Figure
from analysis.report.drawing.markup import number, share
from analysis.report.figures import counts
from analysis.report.figures.counts import Counts
from analysis.report.figures.mismatch import fullest_cells

Floats = npt.NDArray[np.float64]
FLAG_WORDS = {
    "clip_high": "clipped high", "clip_low": "clipped low", "clip_dual": "clipped dual",
    "clip_cov": "drawn by Clip-Cov", "wrong_high": "wrong side, high", "wrong_low": "wrong side, low",
    "bound_high": "weight bounded above", "bound_low": "weight bounded below", "kl_cov": "penalised by KL-Cov",
}  # fmt: skip


@dataclass(frozen=True)
class ClipBounds:
    """The bounds of the ratio in the last iteration; `adaptive` if other iterations had other bounds."""

    low: float
    high: float
    adaptive: bool

    def rules(self, log: bool) -> tuple[Rule, Rule]:
        """Both bounds as lines, at the ratio or at its logarithm."""

        def at(bound: float) -> float:
            return float(np.log(bound)) if log else bound

        low, high = f"lower bound {self.low:g}", f"upper bound {self.high:g}"
        return Rule(at(self.low), low, below=True), Rule(at(self.high), high)


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
    x = Axis("step of the iteration", 0.0, float(len(steps)), ticks=_step_ticks(steps))
    y = Axis("log ratio (nats)", -reach, reach)
    outside = _outside(grid, edges, bounds)
    about = f"Log-ratios by step of the iteration. {outside}"
    at = np.arange(len(steps) + 1, dtype=np.float64)
    chart = heat_map(at, visible_edges, shares[:, inside], x, y, about, rules=bounds.rules(log=True) if bounds else ())
    caption = (
        "Each column is a step (epoch.minibatch), all iterations together; stronger is a larger share of its tokens "
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


def definition_figure(steps: pd.DataFrame) -> Figure:
    """Clip fraction by three definitions, token mean over the steps of each iteration.

    `steps` has columns iteration, n_tok, band_out, grad_zero, clip_floor (shares of the n_tok tokens of a step).
    """
    names = {"outside the band": "band_out", "gradient removed": "grad_zero", "without any step": "clip_floor"}
    stepped = steps[steps["n_tok"] > 0]
    weights = stepped["n_tok"].to_numpy(np.float64)
    weighted = stepped[[*names.values()]].mul(weights, axis=0).assign(iteration=stepped["iteration"], n_tok=weights)
    sums = weighted.groupby("iteration").sum()
    rates = sums[[*names.values()]].div(sums["n_tok"], axis=0)
    at = rates.index.to_numpy(np.float64)
    lines = [Line(name, at, rates[column].to_numpy(np.float64)) for name, column in names.items()]
    whole = sums[[*names.values()]].sum() / sums["n_tok"].sum()
    summary = ", ".join(f"{name} {number(100 * float(whole[column]), 3)} %" for name, column in names.items())
    y = axis_for("share of token updates", [line.y for line in lines])
    chart = line_chart(lines, axis_for("iteration", [at]), y, f"Clip fraction by three definitions: {summary}.")
    caption = (
        f"Whole run: {summary}. Outside the band counts both signs of the advantage, as some dashboards do; without "
        "any step is what the mismatch alone would clip."
    )
    return Figure("Clip fraction, by definition", chart, caption, rates.reset_index())


def quadrant_figure(grid: Counts, bounds: ClipBounds | None) -> Figure:
    """Ratio against advantage, the two regions without gradient shaded; `grid` from `counts.quadrant_grid`."""
    x_edges, y_edges = counts.ADVANTAGE_EDGES, counts.RATIO_EDGES
    x = Axis("advantage", float(x_edges[0]), float(x_edges[-1]))
    marks = tuple((2.0**power, f"{2.0**power:g}") for power in (-2, -1, 0, 1, 2))
    y = Axis("ratio", float(y_edges[0]), float(y_edges[-1]), True, marks)
    total = int(grid.sum())
    under = () if bounds is None else ((0.0, 4.0, bounds.high, 4.0), (-4.0, 0.0, 0.25, bounds.low))
    about = f"{total:,} token updates by advantage and ratio."
    rules = (Rule(1.0, ""), Rule(0.0, "", "x"))
    chart = heat_map(x_edges, y_edges, grid, x, y, about, rules=rules, under=under)
    shading = "Shaded: the clip removes the gradient. " if bounds else ""
    caption = f"{shading}Stronger is more token updates (log scale); values beyond the ends are in the outermost bins."
    numbers = fullest_cells(x_edges, y_edges, grid, "advantage", "ratio")
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


def overshoot_figure(overshoot: pd.DataFrame) -> Figure:
    """Share of token updates more than x beyond the nearer bound, one line per epoch.

    `overshoot` has columns epoch, beyond, count, total.
    """
    lines = []
    for epoch, rows in overshoot.groupby("epoch"):
        survival = rows["count"].to_numpy(np.float64) / rows["total"].to_numpy(np.float64)
        positive = survival > 0
        lines.append(Line(f"epoch {epoch}", rows["beyond"].to_numpy(np.float64)[positive], survival[positive]))
    drawn = [line for line in lines if len(line.x)]
    x = axis_for("ratio beyond the nearer bound, more than", [line.x for line in drawn], log=True)
    y = axis_for("share of token updates", [line.y for line in drawn], log=True)
    ends = "; ".join(f"{line.name}: {number(line.y[0])} beyond {number(line.x[0])}" for line in drawn)
    chart = line_chart(drawn, x, y, f"Survival curve of the overshoot. {ends}.")
    caption = "How far ratios go beyond the clip bounds, either side. A bound that held would be a cliff at the left."
    return Figure("Overshoot", chart, caption, overshoot[overshoot["count"] > 0])


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


def _step_ticks(steps: pd.DataFrame) -> tuple[tuple[float, str], ...]:
    every = max(1, len(steps) // 8)
    rows = list(zip(steps["epoch"], steps["minibatch"], strict=True))
    return tuple((k + 0.5, f"{e}.{m}") for k, (e, m) in enumerate(rows) if k % every == 0)
