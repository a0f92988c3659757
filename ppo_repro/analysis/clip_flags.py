"""Which tokens did the clip change? Each definition of "clipped" is a flag per token.

Flags of this file are computed in float64, with strict inequalities. Analyses count tokens as clipped by

    what                                         where                      counted in
    ratio and advantage, for any clip range      `token_flags`              clipping.py
    ratio and advantage before any step          `clipped_at_start`         clipping.py, grid_outcomes.py: clip_floor
    recorded ratio, whatever the advantage       `is_outside`               grid_outcomes.py: outside_fraction
    recorded flag: the gradient was removed      recorded_flags.py          page_numbers.py, word_clip.py: removed,
                                                                            grid_outcomes.py: clip_fraction
    the same in SQL, by response                 view/database.py           the column Clipped of `ppo-repro view`
    ratio of a whole word                        tokenization/word_clip.py  word_clip.py: word_outside
    new and old value                            `value_flags`              clipping.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, assert_never

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.base.errors import UserError
from ppo_repro.config.algorithm import (
    AdaptiveClipObjective,
    Anchor,
    CispoObjective,
    ClipObjective,
    FunctionObjective,
    PenaltyObjective,
    PolicyGradientObjective,
    PPOConfig,
    PredictedValue,
    SequenceClipObjective,
    UnclippedObjective,
    ValueConfig,
)
from ppo_repro.statistics.clusters import Floats

Bool = npt.NDArray[np.bool_]

# five flags of ratios that never overlap; a token is `outside` if it has one of them
DISJOINT = ("clip_high", "clip_low", "wrong_high", "wrong_low", "outside_without_advantage")
FLAGS = ("outside", *DISJOINT, "clip_dual", "removed")
VALUE_FLAGS = ("value_outside", "value_removed")


@dataclass(frozen=True)
class ClipRule:
    """Clip range of one iteration. Ratios in [1 - low, 1 + high] are in the band."""

    unit: Literal["token", "response"]  # what a ratio is of
    anchor: Anchor  # the denominator of the ratio
    low: float
    high: float
    dual: float | None = None  # where the advantage is negative, ratios above it have no gradient


def rule_or_reason(ppo: PPOConfig, recorded: float) -> ClipRule | str:
    """Return the clip range of an iteration, or the reason why the objective has none.

    `recorded` is the column `clip_range` of the table `iterations`, which only an adaptive objective has.
    """
    match ppo.objective:
        case ClipObjective() as o:
            return ClipRule("token", ppo.ratio_anchor, o.clip_range, o.high, o.dual_clip)
        case AdaptiveClipObjective():
            return ClipRule("token", ppo.ratio_anchor, recorded, recorded)
        case SequenceClipObjective() as o:
            return ClipRule("response", ppo.ratio_anchor, o.clip_range, o.high)
        case CispoObjective():
            return "bounds weights and clips nothing"
        case FunctionObjective():
            return "has bounds of its own"
        case PenaltyObjective() | PolicyGradientObjective() | UnclippedObjective():
            return "clips nothing"
        case unknown:
            assert_never(unknown)


def clip_rule(ppo: PPOConfig, recorded: float) -> ClipRule | None:
    """Return the clip range of `rule_or_reason`; None if the objective clips no ratio, or has bounds of its own."""
    rule = rule_or_reason(ppo, recorded)
    return rule if isinstance(rule, ClipRule) else None


def token_rule(ppo: PPOConfig, recorded: float) -> ClipRule | None:
    """Return `clip_rule` if it bounds the ratio of each token, otherwise None."""
    rule = clip_rule(ppo, recorded)
    return rule if rule is not None and rule.unit == "token" else None


def counted_rule(ppo: PPOConfig, recorded: float, band: tuple[float, float] | None = None) -> ClipRule:
    """Return the rule by which tokens are counted: `band` (low, high), or by default the run's own `token_rule`.

    Raises UserError if the objective does not clip token ratios and `band` is None, or for a wrong band.
    """
    if band is not None:
        low, high = band
        if not (0.0 < low < 1.0 and 0.0 < high < np.inf):
            raise UserError(f"clip range = {low:g}, {high:g}: the lower must be between 0 and 1, the upper above 0")
        return ClipRule("token", ppo.ratio_anchor, low, high)
    rule = rule_or_reason(ppo, recorded)
    if isinstance(rule, ClipRule) and rule.unit == "token":
        return rule
    why = "clips whole responses" if isinstance(rule, ClipRule) else rule
    raise UserError(
        f"ppo.objective.kind = {ppo.objective.kind} {why}, only clip and adaptive_clip clip by the token's ratio; "
        "give a clip range to see what it would have clipped"
    )


def value_reach(value: ValueConfig, return_scale: float) -> float:
    """Return how far a value moves from its old prediction before it is clipped, reward units; inf without a clip."""
    if not isinstance(value, PredictedValue) or value.clip_range is None:
        return math.inf
    return value.clip_range * (return_scale if value.normalize_returns else 1.0)


def column(rows: pd.DataFrame, name: str) -> Floats:
    """Return a column as a float64 array."""
    return rows[name].to_numpy(dtype=np.float64)


def ratios_of(log_ratios: Floats) -> Floats:
    """Return the ratio r = exp(log_ratio), float64; infinite if the exponential overflows."""
    with np.errstate(over="ignore"):
        return np.exp(log_ratios)


def is_outside(ratios: Floats, low: float, high: float) -> Bool:
    """Return which ratios [N] are below 1 - low or above 1 + high, bool [N], whatever the advantage."""
    return (ratios < 1.0 - low) | (ratios > 1.0 + high)


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
    above, below = ratios > 1.0 + rule.high, ratios < 1.0 - rule.low
    up, down = advantages > 0, advantages < 0
    beyond = np.zeros(len(ratios), dtype=bool) if rule.dual is None else (ratios > rule.dual) & down
    return {
        "outside": is_outside(ratios, rule.low, rule.high),
        "clip_high": above & up,
        "clip_low": below & down,
        "wrong_high": above & down,
        "wrong_low": below & up,
        "outside_without_advantage": (above | below) & (advantages == 0),
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
