"""Which tokens did the clip change? Each definition of "clipped" is a flag per token.

Flags are computed in float64, with strict inequalities.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis.clusters import Floats
from ppo_repro.base.errors import UserError
from ppo_repro.config.algorithm import ClipObjective, PredictedValue, clip_band
from ppo_repro.config.run import RunConfig

Bool = npt.NDArray[np.bool_]

# objectives whose bounds the clip analyses do not count: they are not on the ratio of each token
NOT_BY_TOKEN = {
    "sequence_clip": "clips whole responses",
    "cispo": "bounds weights and clips nothing",
    "function": "has bounds of its own",
}

# five flags that never overlap; a token is `outside` if it has one of them
DISJOINT = ("clip_high", "clip_low", "wrong_high", "wrong_low", "outside_without_advantage")
FLAGS = ("outside", *DISJOINT, "clip_dual", "removed")
VALUE_FLAGS = ("value_outside", "value_removed")


@dataclass(frozen=True)
class ClipRule:
    """Clip range of one iteration. Ratios in [1 - low, 1 + high] are in the band."""

    anchor: str  # rollout or old: the denominator of the ratio
    low: float
    high: float
    dual: float | None  # where the advantage is negative, ratios above it have no gradient
    value_range: float | None  # of the value around its old prediction, reward units; None: not clipped


def clip_rule(config: RunConfig, iteration: pd.Series, band: tuple[float, float] | None = None) -> ClipRule:
    """Return the clip range of a row of the table `iterations`; `band` (low, high) replaces the run's range.

    Raises UserError if the objective does not clip token ratios and `band` is None, or for a wrong band.
    """
    objective, value = config.ppo.objective, config.value
    dual = objective.dual_clip if band is None and isinstance(objective, ClipObjective) else None
    bounds = band or clip_band(objective, float(iteration["clip_range"]))
    if bounds is None:
        what = NOT_BY_TOKEN.get(objective.kind, "clips nothing")
        raise UserError(
            f"ppo.objective.kind = {objective.kind} {what}, only clip and adaptive_clip clip by the token's ratio; "
            "give a clip range to see what it would have clipped"
        )
    low, high = bounds
    if not (0.0 < low < 1.0 and 0.0 < high < np.inf):
        raise UserError(f"clip range = {low:g}, {high:g}: the lower must be between 0 and 1, the upper above 0")
    value_range = None
    if isinstance(value, PredictedValue) and value.clip_range is not None:
        value_range = value.clip_range * (float(iteration["return_scale"]) if value.normalize_returns else 1.0)
    return ClipRule(config.ppo.ratio_anchor, low, high, dual, value_range)


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


def recorded_clipped(flags: pd.Series) -> Bool:
    """Return which flags of the column `clip_flag` say that the clip removed the gradient, bool [N]; null does not."""
    return flags.str.startswith("clip_").fillna(False).to_numpy(np.bool_)


def value_flags(rows: pd.DataFrame, rule: ClipRule) -> pd.DataFrame:
    """Return the columns value_outside and value_removed (bool) for rows of steps that the value model took.

    value_outside: |v - v_old| > range. value_removed: value_outside and (v_clip - R)^2 > (v - R)^2; the value has no
    gradient. All are false if values are not clipped.
    """
    new, old, returns = (column(rows, name) for name in ("new_values", "values", "returns"))
    reach = np.inf if rule.value_range is None else rule.value_range
    moved = new - old
    outside = np.abs(moved) > reach
    farther = (old + np.clip(moved, -reach, reach) - returns) ** 2 > (new - returns) ** 2
    return pd.DataFrame({"value_outside": outside, "value_removed": outside & farther}, index=rows.index)
