"""Every definition of "clipped" that is in use, per token, in float64 and with strict inequalities."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.clipping.update_rows import Bool, ClipRule, Float64, IterationRows, column, policy_rows

# five flags that never overlap and together are band_out
DISJOINT = ("clip_high", "clip_low", "wrong_high", "wrong_low", "out_without_advantage")
FLAGS = ("band_out", *DISJOINT, "dual_zero", "grad_zero", "cispo_clipped", "seq_clip", "binary_tv_out")
TV_RANGE = 0.2  # prime-rl's default for the binary total variation
RECORDED = ("none", "clip_high", "clip_low", "wrong_high", "wrong_low", "clip_dual")


def ratios_of(log_ratios: Float64) -> Float64:
    """r = exp(log_ratio), float64; infinite where the exponential overflows."""
    with np.errstate(over="ignore"):
        return np.exp(log_ratios)


def flags_of_ratios(ratios: Float64, advantages: Float64, rule: ClipRule) -> dict[str, Bool]:
    """The flags that depend on ratio and advantage alone.

    band_out: r < 1 - low or r > 1 + high. clip_high: A > 0 and r > 1 + high; clip_low: A < 0 and r < 1 - low;
    wrong_high: A < 0 and r > 1 + high; wrong_low: A > 0 and r < 1 - low; out_without_advantage: band_out and A = 0.
    dual_zero: A < 0 and r > c, only with a dual clip. grad_zero: clip_high, clip_low or dual_zero.
    cispo_clipped: r differs from clip(r). For a ratio of NaN all flags are false.
    """
    above, below = ratios > 1.0 + rule.high, ratios < 1.0 - rule.low
    up, down = advantages > 0, advantages < 0
    flags = {
        "band_out": above | below,
        "clip_high": above & up,
        "clip_low": below & down,
        "wrong_high": above & down,
        "wrong_low": below & up,
        "out_without_advantage": (above | below) & (advantages == 0),
    }
    beyond = np.zeros(len(ratios), dtype=bool) if rule.dual is None else (ratios > rule.dual) & down
    bounded = np.clip(ratios, 1.0 - rule.low, 1.0 + rule.high)
    return {
        **flags,
        "dual_zero": beyond,
        "grad_zero": flags["clip_high"] | flags["clip_low"] | beyond,
        "cispo_clipped": (bounded != ratios) & ~np.isnan(ratios),
    }


def sequence_codes(rows: pd.DataFrame) -> npt.NDArray[np.int64]:
    """A dense code for each (epoch, minibatch, sequence)."""
    return rows.groupby(["epoch", "minibatch", "sequence"], sort=False).ngroup().to_numpy().astype(np.int64)


def token_flags(rows: pd.DataFrame, rule: ClipRule, tv_range: float = TV_RANGE) -> pd.DataFrame:
    """All flags of FLAGS for rows of policy steps, bool, and `ratio`, float64; the index of `rows` is kept.

    seq_clip: for every token of a response, the rule of grad_zero (without dual clip) applied to
    s = exp(mean of log r over the response), GSPO (Zheng et al., 2025). binary_tv_out: p_new - p_anchor > tv_range
    where A > 0, < -tv_range where A < 0, DPPO.
    """
    log_ratios, advantages = column(rows, "log_ratios"), column(rows, "advantages")
    flags = flags_of_ratios(ratios_of(log_ratios), advantages, rule)
    codes = sequence_codes(rows)
    lengths = np.bincount(codes)
    means = np.bincount(codes, log_ratios) / lengths
    by_sequence = ratios_of(means)[codes]
    with np.errstate(invalid="ignore"):
        moved = np.exp(column(rows, "new_logprobs")) - np.exp(column(rows, "anchor_logprobs"))
    up, down = advantages > 0, advantages < 0
    flags["seq_clip"] = (by_sequence > 1.0 + rule.high) & up | (by_sequence < 1.0 - rule.low) & down
    flags["binary_tv_out"] = (moved > tv_range) & up | (moved < -tv_range) & down
    ordered = {name: flags[name] for name in FLAGS}
    return pd.DataFrame({**ordered, "ratio": ratios_of(log_ratios)}, index=rows.index)


def value_flags(rows: pd.DataFrame, rule: ClipRule) -> pd.DataFrame:
    """vf_band_out: |v - v_old| > range; vf_grad_zero: band_out and (v_clip - R)^2 > (v - R)^2. Bool.

    For rows of steps that the value model took; all False without a clip range.
    """
    new, old, returns = (column(rows, name) for name in ("new_values", "values", "returns"))
    if rule.value_range is None:
        nothing = np.zeros(len(rows), dtype=bool)
        return pd.DataFrame({"vf_band_out": nothing, "vf_grad_zero": nothing}, index=rows.index)
    moved = new - old
    outside = np.abs(moved) > rule.value_range
    clipped = old + np.clip(moved, -rule.value_range, rule.value_range)
    farther = (clipped - returns) ** 2 > (new - returns) ** 2
    return pd.DataFrame({"vf_band_out": outside, "vf_grad_zero": outside & farther}, index=rows.index)


def _classes(ratios: Float64, advantages: Float64, low: float, high: float, dual: float) -> npt.NDArray[np.int64]:
    """Index into RECORDED of each token, for these bounds without rounding."""
    classes = np.zeros(len(ratios), dtype=np.int64)
    above, below, up, down = ratios > high, ratios < low, advantages > 0, advantages < 0
    for index, where in enumerate((above & up, below & down, above & down, below & up, (ratios > dual) & down), 1):
        classes[where] = index
    return classes


def recorded_against_float64(item: IterationRows) -> pd.DataFrame:
    """One row: how many recorded clip flags (float32, as in the loss) differ from the float64 ones, and why.

    bound_rounding: the float32 ratio lies between the bound and the bound rounded to float32.
    ratio_rounding: rounding to float32 moved the ratio to the other side of the bound.
    unexplained: the recorded flag does not follow from the recorded float32 ratio and float32 bounds; must be 0.
    """
    rows, rule = policy_rows(item), item.rule
    advantages, ratio32 = column(rows, "advantages"), rows["ratios"].to_numpy(np.float32)
    recorded = pd.Index(RECORDED).get_indexer(pd.Index(rows["clip_flag"]))
    bounds = (1.0 - rule.low, 1.0 + rule.high, np.inf if rule.dual is None else rule.dual)
    rounded = tuple(float(np.float32(bound)) for bound in bounds)
    wide = ratio32.astype(np.float64)
    exact = _classes(ratios_of(column(rows, "log_ratios")), advantages, *bounds)
    differ = recorded != exact
    only_bounds = _classes(wide, advantages, *bounds) == exact
    as_loss = _classes(wide, advantages, *rounded)
    counts = {
        "iteration": item.iteration,
        "n_tok": len(rows),
        "differ": int(differ.sum()),
        "bound_rounding": int((differ & only_bounds).sum()),
        "ratio_rounding": int((differ & ~only_bounds).sum()),
        "unexplained": int((recorded != as_loss).sum()),
    }
    return pd.DataFrame([counts])
