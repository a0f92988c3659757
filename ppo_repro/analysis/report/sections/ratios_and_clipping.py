"""Make the section "Ratios and clipping" of a run's page.

ratio = exp(new_logprobs - anchor) from the recorded columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ppo_repro.analysis.clip_flags import DRAWN, Effect, flags_with
from ppo_repro.analysis.clip_rules import ClipRule, token_rule
from ppo_repro.analysis.html.axes import axis_for
from ppo_repro.analysis.html.charts import Line, Rule, line_chart
from ppo_repro.analysis.html.markup import number, percentage
from ppo_repro.analysis.html.page import Figure, Section
from ppo_repro.analysis.report.data.page_numbers import QUANTILES, PageNumbers
from ppo_repro.analysis.report.data.run_facts import Facts
from ppo_repro.config.algorithm import FunctionObjective
from ppo_repro.config.run import RunConfig


def clipping_section(facts: Facts, numbers: PageNumbers) -> Section:
    """Return the section about ratios and clipping; if no ratio is finite, a sentence replaces the figures."""
    title = "Ratios and clipping"
    if not len(numbers.ratios):
        return Section("clipping", title, ("No ratio is finite, so there is no figure of them.",))
    rules = bounds_as_rules(facts)
    drawn = [
        ratio_figure(ratios_by_step(numbers.ratios), rules),
        extremes_figure(extreme_ratios(numbers.ratios), rules),
    ]
    if numbers.flags[list(DRAWN)].to_numpy().any():
        drawn.append(flag_figure(numbers.flags))
    notes: tuple[str, ...] = ()
    if isinstance(facts.config, RunConfig) and isinstance(facts.config.ppo.objective, FunctionObjective):
        name = Path(facts.config.ppo.objective.path).name
        says = "says" if facts.own_steps["clip_fraction"].notna().any() else "does not say"
        notes = (f"{name}, the objective of this run, {says} which tokens it cut.",)
    elif isinstance(facts.config, RunConfig) and not rules:
        notes = (f"The objective {facts.config.ppo.objective.kind} does not clip by a token's ratio.",)
    return Section("clipping", title, notes, drawn)


def bounds_as_rules(facts: Facts) -> list[Rule]:
    """Return the bounds of the ratio in the last iteration as lines; [] for an objective that does not clip by it."""
    config = facts.config
    ranges = (facts.own_iterations if isinstance(config, RunConfig) else facts.own_steps)["clip_range"]
    last = float(ranges.iloc[-1])
    rule = token_rule(config.ppo, last) if isinstance(config, RunConfig) else ClipRule("token", "rollout", last, last)
    if rule is None:
        return []
    low, high, when = 1.0 - rule.low, 1.0 + rule.high, " (last iteration)" if ranges.nunique() > 1 else ""
    return [Rule(low, f"bounds {low:g} and {high:g}{when}"), Rule(high)]


def ratios_by_step(ratios: pd.DataFrame) -> pd.DataFrame:
    """Return the quantiles of the ratios by epoch and minibatch, mean over the iterations of `ratio_quantiles`."""
    return ratios.drop(columns="iteration").groupby(["epoch", "minibatch"], as_index=False).mean()


def ratio_figure(steps: pd.DataFrame, rules: Sequence[Rule]) -> Figure:
    """Draw the median and the middle 98 % of `ratios_by_step`, with the bounds of the ratio as `rules`."""
    step = np.arange(len(steps), dtype=np.float64)
    low, middle, high = (steps[name].to_numpy(np.float64) for name in ("low", "median", "high"))
    x, y = axis_for("optimizer step of an iteration", [step]), axis_for("ratio", [low, high], include=_marked(rules))
    alt = f"In the last step the median ratio is {number(float(middle[-1]))}, 98 % are from {number(float(low[-1]))} "
    alt += f"to {number(float(high[-1]))}."
    chart = line_chart([Line("median", step, middle, low, high)], x, y, alt, rules)
    caption = f"Median, and the middle 98 % as band, mean over the iterations. {alt}"
    named = steps.rename(columns={name: f"{100 * q:g} % below" for name, q in QUANTILES.items()})
    return Figure("Ratios within an iteration", chart, caption, named)


def extreme_ratios(ratios: pd.DataFrame) -> pd.DataFrame:
    """Return the smallest and the largest ratio of each iteration: columns iteration, smallest, largest."""
    return ratios.groupby("iteration", as_index=False).agg(smallest=("smallest", "min"), largest=("largest", "max"))


def extremes_figure(extremes: pd.DataFrame, rules: Sequence[Rule]) -> Figure:
    """Draw `extreme_ratios`, with the bounds of the ratio as `rules`."""
    at, smallest, largest = (extremes[name].to_numpy(np.float64) for name in extremes.columns)
    lines = [Line("largest", at, largest), Line("smallest", at, smallest, colour=1)]
    y = axis_for("ratio", [smallest, largest], log=True, include=_marked(rules))
    summary = f"Largest ratio of all: {number(float(largest.max()))}."
    chart = line_chart(lines, axis_for("iteration", [at]), y, f"Extreme ratios by iteration. {summary}", rules)
    bounding = "Clipping removes a token's gradient; it does not bound its ratio, which other tokens still move."
    return Figure("Extreme ratios", chart, f"{summary} {bounding}", extremes)


def _marked(rules: Sequence[Rule]) -> list[float]:
    """Return the ratios that an axis includes: the bounds, or 1 without bounds."""
    return [rule.value for rule in rules] or [1.0]


def flag_figure(flags: pd.DataFrame) -> Figure:
    """Draw the disjoint clip flags as shares of the token updates of each iteration.

    `flags` has columns iteration, the flags of DRAWN and token_updates, all counts.
    """
    rows = flags[flags["token_updates"] > 0]
    at, total = (rows[name].to_numpy(np.float64) for name in ("iteration", "token_updates"))
    lines = [
        Line(words, at, rows[flag].to_numpy(np.float64) / total, colour=colour)
        for colour, (flag, words) in enumerate(DRAWN.items())
        if rows[flag].any()
    ]
    y = axis_for("share of token updates", [line.y for line in lines], include=(0.0,))
    summary, meaning = _flags_in_words(rows)
    chart = line_chart(lines, axis_for("iteration", [at]), y, summary)
    return Figure("Clip flags by iteration", chart, f"{summary} {meaning}", flags)


def _flags_in_words(rows: pd.DataFrame) -> tuple[str, str]:
    """Return the shares of the flags in `rows` as sentences, and what these flags mean."""

    def visits(effect: Effect) -> int:
        return int(rows[flags_with(effect)].to_numpy().sum())

    removed, kept, bounded = visits("removed"), visits("kept"), visits("bounded")
    count = int(rows["token_updates"].sum())
    visited = f"Of {number(count)} token updates"
    shares, meanings = [], []
    if removed or kept:
        shares.append(
            f"{visited} the clip removed the gradient of {percentage(removed, count)}; "
            f"{percentage(kept, count)} were outside the band and kept it."
        )
        meanings.append(
            "Clipped high: advantage above 0 and ratio above the upper bound; clipped low: the mirror image; "
            "wrong side: outside the band, but the gradient leads back into it and is kept."
        )
    if bounded:
        shares.append(f"{visited} {percentage(bounded, count)} had a bounded weight and kept their gradient.")
        meanings.append(
            "Weight bounded above: the ratio is above the upper bound, which is the weight instead; "
            "bounded below: the mirror image."
        )
    return " ".join(shares), " ".join(meanings)
