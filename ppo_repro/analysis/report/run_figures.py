"""Draw the figures of a run's page: mismatch, clipping, scores. Each function takes counts or a table.

delta = old_logprobs - rollout_logprobs, nats; ratio = exp(new_logprobs - anchor) from the recorded columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis.html.charts import Axis, Line, Rule, axis_for, bar_chart, line_chart
from ppo_repro.analysis.html.markup import number, share
from ppo_repro.analysis.html.page import Figure
from ppo_repro.analysis.pairs.lag_turn_route import LAG, ROUTE, ROUTES, TURN
from ppo_repro.analysis.stats.clusters import Floats
from ppo_repro.config.algorithm import clip_band
from ppo_repro.config.control import ControlConfig
from ppo_repro.config.run import RunConfig

FLAG_WORDS = {
    "clip_high": "clipped high", "clip_low": "clipped low", "clip_dual": "clipped dual",
    "wrong_high": "wrong side, high", "wrong_low": "wrong side, low",
    "bound_high": "weight bounded above", "bound_low": "weight bounded below",
}  # fmt: skip
MAX_VALUES = 12  # with at most this many different values, each value has a bar
BINS = 24


@dataclass(frozen=True)
class ClipBounds:
    """Bounds of the ratio in the last iteration; `adaptive` if other iterations had other bounds."""

    low: float
    high: float
    adaptive: bool = False

    @property
    def rules(self) -> tuple[Rule, Rule]:
        """Return both bounds as dotted lines."""
        when = " (last iteration)" if self.adaptive else ""
        return Rule(self.low, f"bounds {self.low:g} and {self.high:g}{when}"), Rule(self.high)


def clip_bounds(config: RunConfig | ControlConfig, iterations: pd.DataFrame, steps: pd.DataFrame) -> ClipBounds | None:
    """Return the bounds of the ratio in the last iteration; None for an objective that does not clip the ratio."""
    ranges = (steps if isinstance(config, ControlConfig) else iterations)["clip_range"]
    last = float(ranges.iloc[-1])
    band = (last, last) if isinstance(config, ControlConfig) else clip_band(config.ppo.objective, last)
    return None if band is None else ClipBounds(1.0 - band[0], 1.0 + band[1], bool(ranges.nunique() > 1))


def delta_figure(counted: npt.NDArray[np.int64], edges: Floats, equal: int) -> Figure:
    """Draw a histogram of |delta| for each sign.

    `counted` is the result of `run_scan.delta_counts`; `equal` tokens have delta = 0.
    """
    used = np.flatnonzero(counted.sum(axis=0))
    edges, counted = edges[used[0] : used[-1] + 2], counted[:, used[0] : used[-1] + 1]
    groups = dict(zip(("trainer higher", "trainer lower"), counted, strict=True))
    x = Axis("|old - rollout| log-prob (nats)", float(edges[0]), float(edges[-1]), True)
    y = axis_for("tokens", [counted], include=(0.0,))
    caption = (
        f"{number(equal)} tokens with a difference of 0 are not drawn. Rounding moves as many log-probs up as down; "
        "where one side has more, the error is a bias."
    )
    alt = f"Tokens by size of the log-prob difference, of which {int(counted.sum()):,} are not 0."
    chart = bar_chart(edges, [(name, row.astype(np.float64)) for name, row in groups.items()], x, y, alt)
    numbers = pd.DataFrame({"from (nats)": edges[:-1], "to (nats)": edges[1:], **groups})
    return Figure("Log-prob difference", chart, caption, numbers)


# by kind of bucket: title, label of the axis, caption
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
    """Draw mean, 99th percentile and largest |delta| by bucket of `kind`, a key of BUCKETS.

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
    alt = (
        f"Mean |difference| by {words}: {number(values['mean'][0])} nats in the first bucket, "
        f"{number(values['mean'][-1])} in the last."
    )
    names = [f"{words} {_short(lo)} to {_short(hi)}" for lo, hi in zip(filled["lo"], filled["hi"], strict=True)]
    chart = bar_chart(np.arange(len(filled) + 1, dtype=np.float64), list(values.items()), x, y, alt, names)
    return Figure(title, chart, caption, filled[["lo", "hi", "n", "abs_mean", "abs_p99", "abs_max"]])


def divergence_figure(divergences: pd.DataFrame) -> Figure:
    """Draw |k1| and k3 over the iterations, with their standard errors.

    `divergences` has columns iteration, metric (k1 or k3, nats, token_mean), value, se.
    """
    lines: list[Line] = []
    for metric, name in (("k1", "|k1|"), ("k3", "k3")):
        rows = divergences[divergences["metric"] == metric].sort_values("iteration")
        rows = rows[rows["value"] != 0]  # a logarithmic scale has no zero
        at, size, error = (rows[column].abs().to_numpy(np.float64) for column in ("iteration", "value", "se"))
        low = np.where(size > error, size - error, np.nan)
        lines.append(Line(name, at, size, low, size + error, colour=len(lines)))
    y = axis_for("nats per token, token_mean", [line.y for line in lines], log=True)
    x = axis_for("iteration", [line.x for line in lines])
    last = ", ".join(f"{line.name} {number(line.y[-1])}" for line in lines if len(line.y))
    chart = line_chart(lines, x, y, f"KL(sampler || trainer) by iteration; in the last one {last}.")
    caption = (
        "KL(rollout || old), token_mean, from the sampled tokens: k1 = -delta (its sign is lost here), "
        "k3 = exp(delta) - 1 - delta; band: ± one standard error, clustered by response. "
        "Where |k1| is within its error, only k3 says something."
    )
    return Figure("KL from sampler to trainer", chart, caption, divergences)


def ratio_figures(ratios: pd.DataFrame, bounds: ClipBounds | None) -> list[Figure]:
    """Draw the ratios by step of an iteration, and the extreme ratios by iteration, with their bounds.

    `ratios` has columns iteration, epoch, minibatch and the quantiles 0, 0.01, 0.5, 0.99, 1 of each step's ratios.
    """
    rules = bounds.rules if bounds else ()
    include = (bounds.low, bounds.high) if bounds else (1.0,)
    steps = ratios.drop(columns="iteration").groupby(["epoch", "minibatch"], as_index=False).mean()
    step = np.arange(len(steps), dtype=np.float64)
    low, middle, high = (steps[q].to_numpy(np.float64) for q in (0.01, 0.5, 0.99))
    y = axis_for("ratio", [low, high], include=include)
    alt = f"In the last step the median ratio is {number(float(middle[-1]))}, 98 % are from {number(float(low[-1]))} "
    alt += f"to {number(float(high[-1]))}."
    x = axis_for("optimizer step of an iteration", [step])
    within = line_chart([Line("median", step, middle, low, high)], x, y, alt, rules)
    caption = f"Median, and the middle 98 % as band, mean over the iterations. {alt}"
    by_iteration = ratios.groupby("iteration", as_index=False).agg(smallest=(0.0, "min"), largest=(1.0, "max"))
    at, smallest, largest = (by_iteration[name].to_numpy(np.float64) for name in by_iteration.columns)
    lines = [Line("largest", at, largest), Line("smallest", at, smallest, colour=1)]
    y = axis_for("ratio", [smallest, largest], log=True, include=include)
    summary = f"Largest ratio of all: {number(float(largest.max()))}."
    extremes = line_chart(lines, axis_for("iteration", [at]), y, f"Extreme ratios by iteration. {summary}", rules)
    bounding = "Clipping removes a token's gradient; it does not bound its ratio, which other tokens still move."
    named = steps.rename(columns={q: f"{100 * q:g} % below" for q in (0.0, 0.01, 0.5, 0.99, 1.0)})
    return [
        Figure("Ratios within an iteration", within, caption, named),
        Figure("Extreme ratios", extremes, f"{summary} {bounding}", by_iteration),
    ]


def flag_figure(flags: pd.DataFrame) -> Figure:
    """Draw the disjoint clip flags as shares of the token updates of each iteration.

    `flags` has columns iteration, the flags of FLAG_WORDS and token_updates, all counts.
    """
    rows = flags[flags["token_updates"] > 0]
    at, total = (rows[name].to_numpy(np.float64) for name in ("iteration", "token_updates"))
    lines = [
        Line(words, at, rows[flag].to_numpy(np.float64) / total, colour=colour)
        for colour, (flag, words) in enumerate(FLAG_WORDS.items())
        if rows[flag].any()
    ]
    y = axis_for("share of token updates", [line.y for line in lines], include=(0.0,))
    removed = int(rows[["clip_high", "clip_low", "clip_dual"]].to_numpy().sum())
    wrong = int(rows[["wrong_high", "wrong_low"]].to_numpy().sum())
    count = int(total.sum())
    summary = (
        f"Of {number(count)} token updates the clip removed the gradient of {share(removed, count)}; "
        f"{share(wrong, count)} were outside the band and kept it."
    )
    chart = line_chart(lines, axis_for("iteration", [at]), y, summary)
    caption = (
        f"{summary} Clipped high: advantage above 0 and ratio above the upper bound; clipped low: the mirror image; "
        "wrong side: outside the band, but the gradient leads back into it and is kept."
    )
    return Figure("Clip flags by iteration", chart, caption, flags)


def distribution_figure(title: str, groups: Mapping[str, Floats], name: str, of: str, caption: str) -> Figure:
    """Draw the distribution of the finite values of each group, as bars in percent, side by side.

    Args:
        groups: the values of each group.
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
    shares = [(group, 100.0 * found / found.sum()) for group, found in counts.items() if found.any()]
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
    filled = sorted(iteration for iteration, found in values.items() if np.isfinite(found).any())
    if not filled:
        return []
    groups = {f"iteration {i}": values[i] for i in (filled[0], filled[-1])}
    caption = f"Share of the {of} with each {name}, first and last iteration."
    return [distribution_figure(f"Distribution of the {name}", groups, name, of, caption)]


def _short(value: float) -> str:
    """Return a short label, for example 0.01 or 1e-4."""
    return f"{value:g}" if value == 0 or value >= 1e-3 else f"{value:.0e}".replace("e-0", "e-")
