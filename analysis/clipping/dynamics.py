"""From step to step: which tokens return to the band, when half are clipped, where an early stop would have ended."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.clipping.flags import ratios_of, token_flags
from analysis.clipping.step import overshoot
from analysis.clipping.update_rows import ClipRule, IterationRows, column, policy_rows
from ppo_repro.errors import UserError

HALF = 0.5
# name -> (column of clip_step, sign); the third is what lecture code calls kl = mean(new - old)
ESTIMATES = {"k1": ("kl_k1", 1.0), "k3": ("kl_k3", 1.0), "mean_new_minus_old": ("kl_k1", -1.0)}


def _rate(count: int, whole: int) -> float:
    return count / whole if whole else float("nan")


def band_transitions(item: IterationRows) -> pd.DataFrame:
    """One row per epoch except the last: where each token is at its next visit, one epoch later.

    return_rate: of the tokens outside the band, the share inside at the next visit; leave_rate: of those inside, the
    share outside; still_clipped_rate: of those in grad_zero, the share in it again. NaN where there are none.
    """
    rows = policy_rows(item)
    flags = token_flags(rows, item.rule)[["band_out", "grad_zero"]]
    visits = pd.concat([rows[["sequence", "position", "epoch"]], flags], axis=1)
    next_visits = visits.assign(epoch=visits["epoch"] - 1)
    pairs = visits.merge(
        next_visits, on=["sequence", "position", "epoch"], suffixes=("", "_next"), validate="one_to_one"
    )
    table = []
    for epoch, group in pairs.groupby("epoch", sort=True):
        out, out_next = group["band_out"].to_numpy(bool), group["band_out_next"].to_numpy(bool)
        cut, cut_next = group["grad_zero"].to_numpy(bool), group["grad_zero_next"].to_numpy(bool)
        table.append(
            {
                "iteration": item.iteration,
                "epoch": epoch,
                "n_tok": len(group),
                "n_out": int(out.sum()),
                "n_clipped": int(cut.sum()),
                "return_rate": _rate(int((out & ~out_next).sum()), int(out.sum())),
                "leave_rate": _rate(int((~out & out_next).sum()), int((~out).sum())),
                "still_clipped_rate": _rate(int((cut & cut_next).sum()), int(cut.sum())),
            }
        )
    names = ("iteration", "epoch", "n_tok", "n_out", "n_clipped", "return_rate", "leave_rate", "still_clipped_rate")
    return pd.DataFrame(table, columns=list(names))


def overshoot_shares(rows: pd.DataFrame, rule: ClipRule) -> dict[str, float]:
    """Shares of an iteration's summed overshoot; NaN where nothing overshoots.

    first_step_share: measured by the second step, so caused by the first one, whose gradient no clip had touched (all
    ratios were 1). first_epoch_share: on tokens that no step had trained on yet, moved by other tokens alone.
    """
    over = overshoot(ratios_of(column(rows, "log_ratios")), rule)
    step = rows.groupby(["epoch", "minibatch"], sort=True).ngroup().to_numpy()
    total = float(over.sum())
    if not total or not np.isfinite(total):
        return {"first_step_share": float("nan"), "first_epoch_share": float("nan")}
    first_epoch = rows["epoch"].to_numpy() == 0
    return {
        "first_step_share": float(over[step == 1].sum()) / total,
        "first_epoch_share": float(over[first_epoch].sum()) / total,
    }


def epochs_to_half(clip_step: pd.DataFrame) -> pd.DataFrame:
    """Per iteration, the first epoch (counted from 1) in which half of all tokens are clipped; NaN where none is.

    For grad_zero and for band_out, from the rows `all` of `clip_step`.
    """
    whole = clip_step[(clip_step["subset"] == "all") & (clip_step["n_tok"] > 0)]
    table = []
    for iteration, group in whole.groupby("iteration", sort=True):
        row: dict[str, object] = {"iteration": iteration}
        for name in ("grad_zero", "band_out"):
            clipped = (group[name] * group["n_tok"]).groupby(group["epoch"]).sum()
            rates = clipped / group["n_tok"].groupby(group["epoch"]).sum()
            reached = rates.index[rates >= HALF]
            row[f"epochs_to_half_{name}"] = float(reached[0] + 1) if len(reached) else float("nan")
        table.append(row)
    return pd.DataFrame(table)


def early_stop(clip_step: pd.DataFrame, target_kl: float, factor: float = 1.0) -> pd.DataFrame:
    """Where an early stop would have ended each iteration: after the first step whose estimate > factor target_kl.

    One row per iteration and estimate, from the rows `all` of `clip_step`: k1 = mean(old - new), k3, and
    mean_new_minus_old, whose expectation is -KL, so that it hardly ever stops. steps_taken includes the step that
    measured the estimate; it is all recorded steps where nothing stops. The records say when a stop would have come,
    not what would have followed. Raises UserError for a target or factor that is not positive.
    """
    for name, value in (("target_kl", target_kl), ("factor", factor)):
        if not 0.0 < value < np.inf:
            raise UserError(f"{name} = {value:g}: must be a positive number (target_kl in nats per token)")
    whole = clip_step[(clip_step["subset"] == "all") & (clip_step["n_tok"] > 0)]
    table = []
    for iteration, group in whole.sort_values("step").groupby("iteration", sort=True):
        for estimate, (name, sign) in ESTIMATES.items():
            above = np.flatnonzero(sign * group[name].to_numpy() > factor * target_kl)
            table.append(
                {
                    "iteration": iteration,
                    "estimate": estimate,
                    "stopped": bool(len(above)),
                    "steps_taken": int(above[0]) + 1 if len(above) else len(group),
                    "steps": len(group),
                }
            )
    return pd.DataFrame(table)
