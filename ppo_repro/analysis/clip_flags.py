"""Compute each definition of "clipped": one flag per token, in float64 and with strict inequalities."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ppo_repro.analysis.update_rows import Bool, ClipRule, Floats, column

# five flags that never overlap and together are band_out
DISJOINT = ("clip_high", "clip_low", "wrong_high", "wrong_low", "out_without_advantage")
FLAGS = ("band_out", *DISJOINT, "dual_zero", "grad_zero")


def ratios_of(log_ratios: Floats) -> Floats:
    """Return the ratio r = exp(log_ratio), float64; infinite if the exponential overflows."""
    with np.errstate(over="ignore"):
        return np.exp(log_ratios)


def band_out(ratios: Floats, low: float, high: float) -> Bool:
    """Return which ratios [N] are below 1 - low or above 1 + high, bool [N], whatever the advantage."""
    return (ratios < 1.0 - low) | (ratios > 1.0 + high)


def flags_of_ratios(ratios: Floats, advantages: Floats, rule: ClipRule) -> dict[str, Bool]:
    """Return each flag of FLAGS, bool [N], from ratios and advantages [N]; a ratio of NaN has no flag.

    band_out: r < 1 - low or r > 1 + high. clip_high: A > 0 and r > 1 + high; clip_low: A < 0 and r < 1 - low;
    wrong_high: A < 0 and r > 1 + high; wrong_low: A > 0 and r < 1 - low; out_without_advantage: band_out and A = 0.
    dual_zero: A < 0 and r > c, only with a dual clip. grad_zero: clip_high, clip_low or dual_zero.
    """
    above, below = ratios > 1.0 + rule.high, ratios < 1.0 - rule.low
    up, down = advantages > 0, advantages < 0
    beyond = np.zeros(len(ratios), dtype=bool) if rule.dual is None else (ratios > rule.dual) & down
    return {
        "band_out": band_out(ratios, rule.low, rule.high),
        "clip_high": above & up,
        "clip_low": below & down,
        "wrong_high": above & down,
        "wrong_low": below & up,
        "out_without_advantage": (above | below) & (advantages == 0),
        "dual_zero": beyond,
        "grad_zero": above & up | below & down | beyond,
    }


def token_flags(rows: pd.DataFrame, rule: ClipRule) -> pd.DataFrame:
    """Return the columns FLAGS (bool) and `ratio` (float64) for rows of policy steps, with the index of `rows`."""
    ratios = ratios_of(column(rows, "log_ratios"))
    flags = flags_of_ratios(ratios, column(rows, "advantages"), rule)
    return pd.DataFrame({**flags, "ratio": ratios}, index=rows.index)


def clipped_at_start(rows: pd.DataFrame, rule: ClipRule) -> Bool:
    """Return grad_zero of each token before any step, at pi_old / anchor, bool [N]; false with the anchor `old`."""
    unmoved = ratios_of(column(rows, "old_logprobs") - column(rows, f"{rule.anchor}_logprobs"))
    return flags_of_ratios(unmoved, column(rows, "advantages"), rule)["grad_zero"]


def recorded_clipped(flags: pd.Series) -> Bool:
    """Return which flags of the column `clip_flag` say that the clip removed the gradient, bool [N]; null does not."""
    return flags.str.startswith("clip_").fillna(False).to_numpy(np.bool_)


def value_flags(rows: pd.DataFrame, rule: ClipRule) -> pd.DataFrame:
    """Return the columns vf_band_out and vf_grad_zero (bool) for rows of steps that the value model took.

    vf_band_out: |v - v_old| > range; vf_grad_zero: vf_band_out and (v_clip - R)^2 > (v - R)^2. All are false if values
    are not clipped.
    """
    new, old, returns = (column(rows, name) for name in ("new_values", "values", "returns"))
    reach = np.inf if rule.value_range is None else rule.value_range
    moved = new - old
    outside = np.abs(moved) > reach
    farther = (old + np.clip(moved, -reach, reach) - returns) ** 2 > (new - returns) ** 2
    return pd.DataFrame({"vf_band_out": outside, "vf_grad_zero": outside & farther}, index=rows.index)
