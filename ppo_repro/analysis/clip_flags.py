"""Which tokens did the clip change? Each definition of "clipped" is a flag per token, computed or recorded.

Computed flags follow from the ratio and a `ClipRule`. Recorded flags are the column `clip_flag`. Both compare strictly,
like training. The table "What counts as clipped" in code.md says which measure counts which flags.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis.clip_rules import ClipRule
from ppo_repro.statistics.bits import Float32
from ppo_repro.statistics.clusters import Floats

Bool = npt.NDArray[np.bool_]
Value = TypeVar("Value")
Effect = Literal["unchanged", "removed", "kept", "bounded", "unknown"]


# computed flags


class Flags(NamedTuple, Generic[Value]):
    """A value for each flag: which tokens have it (bool [N]), or the share of the tokens that have it.

    r is the ratio of a token, A its advantage. A ratio of NaN has no flag.
    """

    outside: Value  # r < 1 - low or r > 1 + high
    clip_high: Value  # r > 1 + high and A > 0
    clip_low: Value  # r < 1 - low and A < 0
    wrong_high: Value  # r > 1 + high and A < 0
    wrong_low: Value  # r < 1 - low and A > 0
    outside_without_advantage: Value  # outside and A = 0
    clip_dual: Value  # r > dual and A < 0; no token without a dual clip
    removed: Value  # clip_high, clip_low or clip_dual: the token has no policy gradient


FLAGS = Flags._fields


class ValueFlags(NamedTuple):
    """Which tokens [N] have each flag of the value clip, bool."""

    value_outside: Bool  # |v - v_old| > reach
    value_removed: Bool  # value_outside and (v_clip - R)^2 > (v - R)^2: the value has no gradient


def share(flag: Bool) -> float:
    """Return the share of the tokens that have a flag; NaN without tokens."""
    return float(flag.mean()) if len(flag) else math.nan


def column(rows: pd.DataFrame, name: str) -> Floats:
    """Return a column as a float64 array."""
    return rows[name].to_numpy(dtype=np.float64)


def ratios_of(log_ratios: Floats) -> Floats:
    """Return the ratio r = exp(log_ratio), float64; infinite if the exponential overflows."""
    with np.errstate(over="ignore"):
        return np.exp(log_ratios)


def _below_and_above(ratios: Floats | Float32, rule: ClipRule) -> tuple[Bool, Bool]:
    """Return which ratios [N] are below 1 - low, and which are above 1 + high, both bool [N].

    The bounds are rounded to the precision of the ratios, so recorded ratios have the bounds of training, float32.
    """
    low, high = (ratios.dtype.type(bound) for bound in (1.0 - rule.low, 1.0 + rule.high))
    return ratios < low, ratios > high


def is_outside(ratios: Floats | Float32, rule: ClipRule) -> Bool:
    """Return which ratios [N] are outside the band of the rule, bool [N], whatever the advantage."""
    below, above = _below_and_above(ratios, rule)
    return below | above


def flags_of_ratios(ratios: Floats, advantages: Floats, rule: ClipRule) -> Flags[Bool]:
    """Return the flags of tokens with these ratios and advantages [N]."""
    below, above = _below_and_above(ratios, rule)
    outside, is_positive, is_negative = below | above, advantages > 0, advantages < 0
    clip_high, clip_low = above & is_positive, below & is_negative
    clip_dual = np.zeros_like(outside) if rule.dual is None else (ratios > rule.dual) & is_negative
    return Flags(
        outside=outside,
        clip_high=clip_high,
        clip_low=clip_low,
        wrong_high=above & is_negative,
        wrong_low=below & is_positive,
        outside_without_advantage=outside & (advantages == 0),
        clip_dual=clip_dual,
        removed=clip_high | clip_low | clip_dual,
    )


def token_flags(rows: pd.DataFrame, rule: ClipRule) -> Flags[Bool]:
    """Return the flags of rows of policy steps, at their log_ratios."""
    return flags_of_ratios(ratios_of(column(rows, "log_ratios")), column(rows, "advantages"), rule)


def clipped_at_start(rows: pd.DataFrame, rule: ClipRule) -> Bool:
    """Return the flag `removed` of each token before any step, at r = pi_old / anchor, bool [N]; false for `old`."""
    unmoved = ratios_of(column(rows, "old_logprobs") - column(rows, f"{rule.anchor}_logprobs"))
    return flags_of_ratios(unmoved, column(rows, "advantages"), rule).removed


def value_flags(rows: pd.DataFrame, reach: float) -> ValueFlags:
    """Return the flags of rows of steps that the value model took; all are false if `reach` (`value_reach`) is inf."""
    new, old, returns = (column(rows, name) for name in ("new_values", "values", "returns"))
    moved = new - old
    outside = np.abs(moved) > reach
    farther = (old + np.clip(moved, -reach, reach) - returns) ** 2 > (new - returns) ** 2
    return ValueFlags(value_outside=outside, value_removed=outside & farther)


# recorded flags: their words, what they say about the gradient, and their colours in charts


@dataclass(frozen=True)
class RecordedFlag:
    """Meaning of a value of the column `clip_flag`.

    `effect` on the token's gradient: unchanged, removed by the clip, kept although the ratio is outside the band, kept
    with a bounded weight, or unknown because the objective does not say.
    """

    words: str
    effect: Effect

    @property
    def is_drawn(self) -> bool:
        """Return whether the flag has a line in the chart of flags."""
        return self.effect not in ("unchanged", "unknown")


# `ClipFlag` of ppo/objectives.py, whose module imports torch; style.css has the class f-NAME of each but `none`
RECORDED_FLAGS = {
    "none": RecordedFlag("unchanged", "unchanged"),
    "clip_high": RecordedFlag("clipped high", "removed"),
    "clip_low": RecordedFlag("clipped low", "removed"),
    "clip_dual": RecordedFlag("clipped dual", "removed"),
    "wrong_high": RecordedFlag("wrong side, high", "kept"),
    "wrong_low": RecordedFlag("wrong side, low", "kept"),
    "bound_high": RecordedFlag("weight bounded above", "bounded"),
    "bound_low": RecordedFlag("weight bounded below", "bounded"),
    "unknown": RecordedFlag("the objective does not say", "unknown"),
}
DRAWN = {name: flag.words for name, flag in RECORDED_FLAGS.items() if flag.is_drawn}


def flags_with(effect: Effect) -> list[str]:
    """Return the names of the flags with an effect."""
    return [name for name, flag in RECORDED_FLAGS.items() if flag.effect == effect]


def recorded_clipped(flags: pd.Series) -> Bool:
    """Return which flags of the column `clip_flag` say that the clip removed the gradient, bool [N]; null does not."""
    return flags.isin(flags_with("removed")).to_numpy(np.bool_)


def flag_legend() -> list[dict[str, str]]:
    """Return the name, words and class of style.css of each flag, for token_view.js."""
    return [
        {"name": name, "words": flag.words, "class": "" if flag.effect == "unchanged" else f"f-{name}"}
        for name, flag in RECORDED_FLAGS.items()
    ]
