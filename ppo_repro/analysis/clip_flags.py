"""Which tokens did the clip change? Each definition of "clipped" is a flag per token.

`analyse clipping` and the shares of words compute ratios again, in float64. Like training, they compare strictly.

Pages, `view`, measures of a grid, and `removed` of `analyse tokenization` count the recorded column `clip_flag`. The
measure `outside_fraction` counts the recorded column `ratios`.

The measure `clip_floor` is computed from log-probs. It needs the ratio before the first step, which no run records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis.clip_rules import ClipRule
from ppo_repro.statistics.bits import Float32
from ppo_repro.statistics.clusters import Floats

Bool = npt.NDArray[np.bool_]

# five flags of ratios that never overlap; a token is `outside` if it has one of them
DISJOINT = ("clip_high", "clip_low", "wrong_high", "wrong_low", "outside_without_advantage")
FLAGS = ("outside", *DISJOINT, "clip_dual", "removed")
Effect = Literal["unchanged", "removed", "kept", "bounded", "unknown"]


# computed flags


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


def flags_of_ratios(ratios: Floats, advantages: Floats, rule: ClipRule) -> dict[str, Bool]:
    """Return each flag of FLAGS, bool [N], from ratios and advantages [N]; a ratio of NaN has no flag.

    outside: r < 1 - low or r > 1 + high
    clip_high: r > 1 + high and A > 0
    clip_low: r < 1 - low and A < 0
    wrong_high: r > 1 + high and A < 0
    wrong_low: r < 1 - low and A > 0
    outside_without_advantage: outside and A = 0
    clip_dual: r > dual and A < 0, only with a dual clip
    removed: clip_high, clip_low or clip_dual; the token has no policy gradient
    """
    below, above = _below_and_above(ratios, rule)
    up, down = advantages > 0, advantages < 0
    beyond = np.zeros(len(ratios), dtype=bool) if rule.dual is None else (ratios > rule.dual) & down
    return {
        "outside": below | above,
        "clip_high": above & up,
        "clip_low": below & down,
        "wrong_high": above & down,
        "wrong_low": below & up,
        "outside_without_advantage": (below | above) & (advantages == 0),
        "clip_dual": beyond,
        "removed": above & up | below & down | beyond,
    }


def token_flags(rows: pd.DataFrame, rule: ClipRule) -> pd.DataFrame:
    """Return the columns FLAGS (bool) and `ratio` (float64) for rows of policy steps, with the index of `rows`."""
    ratios = ratios_of(column(rows, "log_ratios"))
    flags = flags_of_ratios(ratios, column(rows, "advantages"), rule)
    return pd.DataFrame({**flags, "ratio": ratios}, index=rows.index)


def clipped_at_start(rows: pd.DataFrame, rule: ClipRule) -> Bool:
    """Return the flag `removed` of each token before any step, at r = pi_old / anchor, bool [N]; false for `old`."""
    unmoved = ratios_of(column(rows, "old_logprobs") - column(rows, f"{rule.anchor}_logprobs"))
    return flags_of_ratios(unmoved, column(rows, "advantages"), rule)["removed"]


def value_flags(rows: pd.DataFrame, reach: float) -> pd.DataFrame:
    """Return the columns value_outside and value_removed (bool) for rows of steps that the value model took.

    value_outside: |v - v_old| > reach (`value_reach`). value_removed: value_outside and (v_clip - R)^2 > (v - R)^2; the
    value has no gradient. All are false if values are not clipped.
    """
    new, old, returns = (column(rows, name) for name in ("new_values", "values", "returns"))
    moved = new - old
    outside = np.abs(moved) > reach
    farther = (old + np.clip(moved, -reach, reach) - returns) ** 2 > (new - returns) ** 2
    return pd.DataFrame({"value_outside": outside, "value_removed": outside & farther}, index=rows.index)


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
