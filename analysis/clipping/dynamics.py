"""From step to step and iteration to iteration: who returns to the band, where an early stop would have ended."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.clipping.flags import ratios_of, token_flags
from analysis.clipping.step import overshoot
from analysis.clipping.update_rows import IterationRows, column, policy_rows
from ppo_repro.errors import UserError

# name -> (column of clip_step, sign); the third is what lecture code calls kl = mean(new - old)
ESTIMATES = {"k1": ("kl_k1", 1.0), "k3": ("kl_k3", 1.0), "mean_new_minus_old": ("kl_k1", -1.0)}
BEYOND = np.array([0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0])


def band_transitions(item: IterationRows) -> pd.DataFrame:
    """One row per epoch except the last: where each token is at its next visit, one epoch later.

    return_rate: of the tokens outside the band, the share inside at the next visit; leave_rate: of those inside, the
    share outside; still_clipped_rate: of those in grad_zero, the share in it again. NaN where there are none.
    """
    rows = policy_rows(item)
    visits = rows[["sequence", "position", "epoch"]].join(token_flags(rows, item.rule)[["band_out", "grad_zero"]])
    keys = ["sequence", "position", "epoch"]
    pairs = visits.merge(visits.assign(epoch=visits["epoch"] - 1), on=keys, suffixes=("", "_next"), validate="1:1")
    table = []
    for epoch, group in pairs.groupby("epoch", sort=True):
        out, out_next, cut, cut_next = (
            group[name] for name in ("band_out", "band_out_next", "grad_zero", "grad_zero_next")
        )
        counts = {"n_tok": len(group), "n_out": int(out.sum()), "n_clipped": int(cut.sum())}
        rates = {
            "return_rate": (~out_next[out]).mean(),
            "leave_rate": out_next[~out].mean(),
            "still_clipped_rate": cut_next[cut].mean(),
        }
        table.append({"iteration": item.iteration, "epoch": epoch, **counts, **rates})
    names = ("iteration", "epoch", "n_tok", "n_out", "n_clipped", "return_rate", "leave_rate", "still_clipped_rate")
    return pd.DataFrame(table, columns=list(names))


def overshoot_survival(item: IterationRows) -> pd.DataFrame:
    """Per epoch, how many tokens lie more than `beyond` outside the band; counts, so that iterations can be added."""
    rows = policy_rows(item)
    over = overshoot(ratios_of(column(rows, "log_ratios")), item.rule)
    tables = []
    for epoch, epoch_rows in rows.groupby("epoch", sort=True).indices.items():
        counts = (over[epoch_rows][:, None] > BEYOND[None, :]).sum(axis=0)
        key = {"iteration": item.iteration, "epoch": epoch, "beyond": BEYOND}
        tables.append(pd.DataFrame({**key, "n_tok": len(epoch_rows), "count": counts}))
    return pd.concat(tables, ignore_index=True)


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
            taken = int(above[0]) + 1 if len(above) else len(group)
            row = {"stopped": bool(len(above)), "steps_taken": taken, "steps": len(group)}
            table.append({"iteration": iteration, "estimate": estimate, **row})
    return pd.DataFrame(table)


def update_quality(sequences: Sequence[tuple[int, pd.Series]]) -> pd.DataFrame:
    """One row per (iteration, scores of its responses): the next iteration's mean score minus this one's.

    score_gain compares sampled scores on different prompts, so its standard error, score_gain_se, is that of two
    independent means. Both are NaN in the last iteration and where the next one was not read.
    """
    table = pd.DataFrame(
        [(iteration, scores.mean(), scores.var(ddof=1) / len(scores)) for iteration, scores in sequences],
        columns=["iteration", "score_mean", "variance"],
    )
    following = table.set_index("iteration").reindex(table["iteration"] + 1)
    table["score_gain"] = following["score_mean"].to_numpy() - table["score_mean"]
    table["score_gain_se"] = np.sqrt(following["variance"].to_numpy() + table.pop("variance"))
    return table
