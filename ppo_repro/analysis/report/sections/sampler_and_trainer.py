"""Make the section "Sampler and trainer" of a run's page, and the sentence about the cause of a difference.

delta = old_logprobs - rollout_logprobs, nats.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis.html.axes import Axis, Tick, axis_for
from ppo_repro.analysis.html.charts import Line, bar_chart, line_chart
from ppo_repro.analysis.html.markup import number
from ppo_repro.analysis.html.page import Figure, Section, Statement
from ppo_repro.analysis.report.data.page_numbers import DELTA_EDGES, Counts, RunMismatch
from ppo_repro.records.logprob_pairs import LAG, ROUTE, ROUTES, TURN


class BucketFigure(NamedTuple):
    """Words of the figure of one kind of bucket."""

    title: str
    axis: str
    caption: str


BUCKETS = {
    "prob": BucketFigure(
        "Difference by probability", "probability under the sampler",
        "Rounding moves the log-probs of rare tokens most: the error goes with 1 - p.",
    ),
    "position": BucketFigure(
        "Difference by position", "position in the response (tokens)",
        "An error that accumulates through the cache would grow with position.",
    ),
    LAG: BucketFigure(
        "Difference by lag", "iterations that the weights of the sampler were behind",
        "Tokens without a lag differ by what else there is.",
    ),
    TURN: BucketFigure(
        "Difference by turn", "turn of the model",
        "What the environment said before is the same on both sides.",
    ),
    ROUTE: BucketFigure(
        "Difference by route", "experts in sampler and trainer",
        "A flip: other experts compute the token in the trainer. After one, a token sees another past.",
    ),
}  # fmt: skip
# columns of the numbers below a figure of buckets
BUCKET_COLUMNS = ["lo", "hi", "n_tokens", "abs_mean", "abs_p99", "abs_max"]


def cause_statement(mismatch: RunMismatch | None) -> Statement:
    """Return the sentence about the cause of a difference between sampler and trainer."""
    if mismatch is None:
        text = "Cause of the difference: no token has two finite log-probs; find out where the others come from."
        return Statement("fact", text)
    cause = mismatch.cause
    untested = f"; not tested: {', '.join(cause.untested)}" if cause.untested else ""
    text = f"Cause of the difference: {cause.verdict}{untested} (tier {cause.tier}).".replace("_", " ")
    return Statement("fact", f"{text} {cause.advice}")


def mismatch_section(counts: Counts, mismatch: RunMismatch | None, draws: list[Figure]) -> Section:
    """Return the section about mismatch and draws; if no difference can be drawn, a sentence replaces its figures."""
    equal, title = counts.zero_deltas, "Sampler and trainer"
    if not counts.deltas.any():
        finite = " finite" if counts.nonfinite_deltas else ""
        which = f"All {equal:,}{finite} differences are exactly 0" if equal else "No difference is finite"
        return Section("mismatch", title, [f"{which}, so there is no distribution of them to draw."], draws)
    figures = [delta_figure(counts.deltas, equal)]
    if mismatch is not None:
        kinds = set(mismatch.buckets["kind"])
        figures += [bucket_figure(mismatch.buckets, kind) for kind in BUCKETS if kind in kinds]
        figures.append(divergence_figure(mismatch.metrics))
    return Section("mismatch", title, figures=[*figures, *draws])


def delta_figure(counted: npt.NDArray[np.int64], equal: int) -> Figure:
    """Draw a histogram of |delta| for each sign.

    `counted` is the result of `page_numbers.delta_counts`; `equal` tokens have delta = 0.
    """
    used = np.flatnonzero(counted.sum(axis=0))
    edges, counted = DELTA_EDGES[used[0] : used[-1] + 2], counted[:, used[0] : used[-1] + 1]
    groups = dict(zip(("trainer higher", "trainer lower"), counted, strict=True))
    x = Axis("|old - rollout| log-prob (nats)", float(edges[0]), float(edges[-1]), True)
    y = axis_for("tokens", [counted], include=(0.0,))
    caption = (
        f"{number(equal)} tokens with a difference of 0 are not drawn. Rounding moves as many log-probs up as down; "
        "where one side has more, the error is a bias."
    )
    alt = f"Tokens by size of the log-prob difference, of which {int(counted.sum()):,} are not 0."
    chart = bar_chart(edges, {name: row.astype(np.float64) for name, row in groups.items()}, x, y, alt)
    numbers = pd.DataFrame({"from (nats)": edges[:-1], "to (nats)": edges[1:], **groups})
    return Figure("Log-prob difference", chart, caption, numbers)


def bucket_figure(buckets: pd.DataFrame, kind: str) -> Figure:
    """Draw mean, 99th percentile and largest |delta| of the buckets of a kind, a key of BUCKETS."""
    words, filled = BUCKETS[kind], buckets.loc[buckets["kind"] == kind, BUCKET_COLUMNS].reset_index(drop=True)
    columns = {"largest": "abs_max", "99th percentile": "abs_p99", "mean": "abs_mean"}
    values = {name: filled[column].to_numpy(np.float64) for name, column in columns.items()}
    # the axis begins below the smallest value, or its bar would have no height
    above_zero = [value[value > 0] / 2 for value in values.values()]
    y = axis_for("|old - rollout| (nats)", [*values.values(), *above_zero], log=True)
    x = Axis(words.axis, 0.0, float(len(filled)), ticks=_ticks(filled, kind))
    alt = (
        f"Mean |difference| by {words.axis}: {number(values['mean'][0])} nats in the first bucket, "
        f"{number(values['mean'][-1])} in the last."
    )
    names = [f"{words.axis} {_short(lo)} to {_short(hi)}" for lo, hi in zip(filled["lo"], filled["hi"], strict=True)]
    chart = bar_chart(np.arange(len(filled) + 1, dtype=np.float64), values, x, y, alt, names)
    return Figure(words.title, chart, words.caption, filled)


def _ticks(filled: pd.DataFrame, kind: str) -> tuple[Tick, ...]:
    """Return the ticks: a route in the middle of its bucket, or else some ends of buckets."""
    if kind == ROUTE:
        return tuple(Tick(k + 0.5, ROUTES[int(route)]) for k, route in enumerate(filled["lo"]))
    ends = [_short(value) for value in [*filled["lo"], filled["hi"].iloc[-1]]]
    stride = max(1, len(ends) // 8)
    return tuple(Tick(float(k), end) for k, end in enumerate(ends) if k % stride == 0)


def divergence_figure(metrics: pd.DataFrame) -> Figure:
    """Draw |k1| and k3 (nats, token_mean) over the iterations, with their standard errors, from `mismatch_table`."""
    is_drawn = metrics["metric"].isin(["k1", "k3"]) & (metrics["reduction"] == "token_mean")
    divergences = metrics.loc[is_drawn, ["iteration", "metric", "value", "se"]]
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


def _short(value: float) -> str:
    """Return a short label, for example 0.01 or 1e-4."""
    return f"{value:g}" if value == 0 or value >= 1e-3 else f"{value:.0e}".replace("e-0", "e-")
