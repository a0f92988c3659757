"""Which clip range has an iteration? It follows from the objective, or is a range that the reader of a run chooses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, assert_never

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
        case ClipObjective() as clip:
            return ClipRule("token", ppo.ratio_anchor, clip.clip_range, clip.high, clip.dual_clip)
        case AdaptiveClipObjective():
            return ClipRule("token", ppo.ratio_anchor, recorded, recorded)
        case SequenceClipObjective() as clip:
            return ClipRule("response", ppo.ratio_anchor, clip.clip_range, clip.high)
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
        if not (0.0 < low < 1.0 and 0.0 < high < math.inf):
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
