"""What did the clip do in a run, in each step and on which tokens?

One iteration is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from ppo_repro.analysis.buckets import DOUBLING, ENTROPIES, PROBABILITIES, bucket_of
from ppo_repro.analysis.clip_flags import (
    FLAGS,
    Bool,
    clipped_at_start,
    column,
    flags_of_ratios,
    ratios_of,
    token_flags,
    value_flags,
)
from ppo_repro.analysis.clip_rules import ClipRule, counted_rule, value_reach
from ppo_repro.analysis.iterations import own_iterations
from ppo_repro.base.errors import UserError
from ppo_repro.records import reader
from ppo_repro.records.folder import load_recorded_config
from ppo_repro.records.logprob_pairs import KEY_IN_ITERATION
from ppo_repro.statistics.clusters import Floats, effective_share
from ppo_repro.statistics.kl import k1, k3

STEP_KEY = ["epoch", "minibatch"]
CLIP_TOKEN_COLUMNS = [
    *("iteration", "sequence", "position", "rollout_logprobs", "old_logprobs", "entropies"),
    *("values", "advantages", "returns"),
]

SUBSETS = {"all": 0, "adv_pos": 1, "adv_neg": -1}  # the sign of the advantages; 0 for any
ESTIMATES = ("k1", "k3")  # of KL(anchor || new)


@dataclass(frozen=True)
class IterationRows:
    """Tables of one iteration: its steps, and one row per step and token."""

    iteration: int
    rule: ClipRule
    value_reach: float
    steps: pd.DataFrame  # epoch, minibatch in order
    rows: pd.DataFrame  # rows of `updates` with CLIP_TOKEN_COLUMNS of their token, and float64 log_ratios


def join_tokens(tokens: pd.DataFrame, updates: pd.DataFrame, anchor: str) -> pd.DataFrame:
    """Return the rows of `updates` with their token's columns and log_ratios = new_logprobs - anchor, float64 nats.

    The order of `updates` is kept. Raises UserError if a row has no token.
    """
    rows = updates.merge(tokens, on=KEY_IN_ITERATION, how="inner", validate="many_to_one")
    if len(rows) != len(updates):
        raise UserError(f"{len(updates) - len(rows)} rows of updates have no row in tokens; the records are damaged")
    new = rows["new_logprobs"].to_numpy(np.float64)
    rows["anchor_logprobs"] = rows[f"{anchor}_logprobs"].to_numpy(np.float64)
    rows["log_ratios"] = new - rows["anchor_logprobs"].to_numpy()
    return rows


def load_iterations(
    run_dir: Path | str,
    *,
    iterations: Sequence[int] | None = None,
    band: tuple[float, float] | None = None,
) -> Iterator[IterationRows]:
    """Yield the iterations of a run; `band` (low, high) replaces the run's clip range.

    A fork begins with the first iteration that it computed, because its origin has another configuration. Raises
    UserError for missing or damaged records, for an iteration of the origin, or if the run clips nothing and `band` is
    None.
    """
    recorded = reader.open_manifest(run_dir)
    summaries = reader.read_iterations(
        run_dir, iterations=own_iterations(run_dir, recorded, iterations), recorded=recorded
    )
    config = load_recorded_config(run_dir)
    for _, row in summaries.iterrows():
        index = int(row["iteration"])
        rule = counted_rule(config.ppo, float(row["clip_range"]), band)
        one = [index]
        tokens = reader.read_tokens(run_dir, iterations=one, columns=CLIP_TOKEN_COLUMNS, recorded=recorded)
        updates = reader.read_updates(run_dir, iterations=one, recorded=recorded).drop(columns="iteration")
        yield IterationRows(
            iteration=index,
            rule=rule,
            value_reach=value_reach(config.value, float(row["return_scale"])),
            steps=reader.read_steps(run_dir, iterations=one, columns=STEP_KEY, recorded=recorded),
            rows=join_tokens(tokens, updates, rule.anchor),
        )


def policy_rows(item: IterationRows) -> pd.DataFrame:
    """Return the rows of the steps in which the policy was updated."""
    return item.rows[item.rows["clip_flag"].notna()]


# the tables of one iteration


def effective_samples(log_weights: Floats) -> float:
    """Return the effective sample size per sample for the weights exp(log_weights); NaN if one is not finite.

    The largest log-weight is first subtracted, which cancels in the quotient and prevents overflow.
    """
    if not len(log_weights) or not np.isfinite(log_weights).all():
        return math.nan
    weights = np.exp(log_weights - log_weights.max())
    return effective_share(float(weights.sum()), float((weights**2).sum()), len(weights))


def kl_estimates(log_ratios: Floats) -> dict[str, float]:
    """Estimate KL(anchor || new) in nats by token means of k1 and k3; the anchor sampled the tokens, at least one."""
    with np.errstate(invalid="ignore"):  # infinities of both signs
        return {"k1": float(k1(-log_ratios).mean()), "k3": float(k3(-log_ratios).mean())}


def surrogate_mass(rows: pd.DataFrame) -> Floats:
    """Return w |r A| of each row of a policy step, float64, without the clip; NaN at the record level `lean`.

    w is the recorded weight of the token in the loss of its step, times its importance weight if the run has them.
    """
    weights = column(rows, "loss_weights") * rows["importance_weights"].astype(np.float64).fillna(1.0).to_numpy()
    return weights * np.abs(ratios_of(column(rows, "log_ratios")) * column(rows, "advantages"))


def _is_in(subset: str, rows: pd.DataFrame) -> Bool:
    sign = SUBSETS[subset]
    return (sign * column(rows, "advantages") > 0) | (sign == 0)


def _numbers(rows: pd.DataFrame, rule: ClipRule) -> dict[str, float]:
    """Return the columns of one row of `clip_step` over these tokens; only n_tokens if there are no tokens."""
    if not len(rows):
        return {"n_tokens": 0}
    log_ratios, mass = column(rows, "log_ratios"), surrogate_mass(rows)
    ratios = ratios_of(log_ratios)
    flags = flags_of_ratios(ratios, column(rows, "advantages"), rule)
    shown = ratios if np.isfinite(ratios).all() else np.array([math.nan])
    beyond = (ratios > 1.0 + 2.0 * rule.high) | (ratios < 1.0 - 2.0 * rule.low)
    total = float(mass.sum())
    return {
        "n_tokens": len(rows),
        "n_nonfinite": int(np.count_nonzero(~np.isfinite(log_ratios))),
        **{name: float(flags[name].mean()) for name in FLAGS},
        "ratio_mean": shown.mean(),
        "ratio_min": shown.min(),
        "ratio_max": shown.max(),
        "beyond_twice": float(beyond.mean()),
        **kl_estimates(log_ratios),
        "ess_frac": effective_samples(log_ratios),
        "removed_mass": float(mass[flags["removed"]].sum()) / total if total and np.isfinite(total) else math.nan,
        "clip_floor": float(clipped_at_start(rows, rule).mean()),
    }


def clip_step(item: IterationRows) -> pd.DataFrame:
    """Return one row per step and subset of tokens: rates of flags, ratios, KL, effective sample size, gradient mass.

    The subsets are all tokens, tokens with A > 0 and tokens with A < 0. A rate is a share of the subset's tokens. It is
    NaN if the subset is empty or the policy took no step. Other columns are

        removed_mass: share of the sum of `surrogate_mass` that the clip removed
        beyond_twice: share of tokens beyond twice the clip range
        clip_floor: share of tokens in `clipped_at_start`
        k1, k3: `kl_estimates`
        value_outside, value_removed: `value_flags`
    """
    policy, moved = policy_rows(item), item.rows[item.rows["new_values"].notna()]
    policy_steps, value_steps = (rows.groupby(STEP_KEY).indices for rows in (policy, moved))
    table = []
    for number, step in enumerate(zip(item.steps["epoch"], item.steps["minibatch"], strict=True)):
        key = {"iteration": item.iteration, "epoch": step[0], "minibatch": step[1], "step": number}
        of_policy, of_value = policy.iloc[policy_steps.get(step, [])], moved.iloc[value_steps.get(step, [])]
        for subset in SUBSETS:
            numbers = _numbers(of_policy[_is_in(subset, of_policy)], item.rule)
            values = value_flags(of_value[_is_in(subset, of_value)], item.value_reach)
            table.append({**key, "subset": subset, **numbers, "n_value_tokens": len(values), **values.mean()})
    return pd.DataFrame(table)


def clip_bucket(item: IterationRows) -> pd.DataFrame:
    """Return the rates of FLAGS by probability under the anchor, by entropy and by position, over all policy steps.

    Columns: iteration, kind (prob, entropy, position), subset (SUBSETS), lo, hi (bins [lo, hi); the last bin includes
    hi), n_tokens, FLAGS. Bins without tokens have no row; a value of NaN has no bin.
    """
    rows = policy_rows(item)
    flags = token_flags(rows, item.rule)[list(FLAGS)]
    kinds = {
        "prob": (np.exp(column(rows, "anchor_logprobs")), PROBABILITIES),
        "entropy": (column(rows, "entropies"), ENTROPIES),
        "position": (column(rows, "position"), DOUBLING),
    }
    tables = []
    for kind, (values, edges) in kinds.items():
        codes, lows = bucket_of(values, edges), np.array(edges)
        for subset in SUBSETS:
            where = _is_in(subset, rows) & (codes >= 0)
            groups = flags[where].groupby(codes[where])
            table = groups.mean()
            bins = table.index.to_numpy(np.int64)
            table = table.assign(iteration=item.iteration, kind=kind, subset=subset, n_tokens=groups.size())
            tables.append(table.assign(lo=lows[bins], hi=lows[bins + 1]))
    names = ["iteration", "kind", "subset", "lo", "hi", "n_tokens", *FLAGS]
    return pd.concat(tables, ignore_index=True)[names]


# the tables and numbers of a run


@dataclass(frozen=True)
class ClipTables:
    """Tables of `clip_step` and `clip_bucket` over all iterations."""

    by_step: pd.DataFrame
    by_bucket: pd.DataFrame


def clip_tables(
    run_dir: Path | str, *, iterations: Sequence[int] | None = None, band: tuple[float, float] | None = None
) -> ClipTables:
    """Return all tables of a run; `band` (low, high) replaces the run's clip range.

    Raises UserError if records are missing, or if the run clips nothing and there is no band.
    """
    steps, buckets = [], []
    for item in load_iterations(run_dir, iterations=iterations, band=band):
        steps.append(clip_step(item))
        buckets.append(clip_bucket(item))
    return ClipTables(pd.concat(steps, ignore_index=True), pd.concat(buckets, ignore_index=True))


def _steps_taken(by_step: pd.DataFrame) -> pd.DataFrame:
    """Return the rows `all` of the steps that the policy took."""
    return by_step[(by_step["subset"] == "all") & (by_step["n_tokens"] > 0)]


def require_target_kl(target_kl: float) -> None:
    """Raise UserError for a target of an early stop that is not positive."""
    if not 0.0 < target_kl < np.inf:
        raise UserError(f"target_kl = {target_kl:g}: must be a positive number (nats per token)")


class EarlyStop(NamedTuple):
    """Where one estimate would have stopped the epochs of an iteration: a row of `early_stop`."""

    iteration: int
    estimate: str  # of ESTIMATES
    stopped: bool
    steps_taken: int  # with the step that measured the estimate; all recorded steps without a stop
    steps: int


def early_stop(by_step: pd.DataFrame, target_kl: float) -> pd.DataFrame:
    """Return an `EarlyStop` per iteration and estimate: it stops at the first step whose estimate exceeds `target_kl`.

    The rows `all` of `clip_step` have the estimates, k1 and k3 of KL(anchor || new), token means in nats. The records
    cannot say what would have followed a stop. Raises UserError for a target that is not positive.
    """
    require_target_kl(target_kl)
    stops = []
    for _, group in _steps_taken(by_step).sort_values("step").groupby("iteration", sort=True):
        iteration = int(group["iteration"].iloc[0])
        for estimate in ESTIMATES:
            above = np.flatnonzero(group[estimate].to_numpy() > target_kl)
            taken = int(above[0]) + 1 if len(above) else len(group)
            stops.append(EarlyStop(iteration, estimate, bool(len(above)), taken, len(group)))
    return pd.DataFrame(stops, columns=EarlyStop._fields)


class RunClipping(NamedTuple):
    """What the clip did in a whole run. A mean without further words is over the token visits."""

    n_tokens: int  # visits: a token counts once in each step
    n_steps: int
    n_iterations: int
    outside: float  # means of FLAGS
    clip_high: float
    clip_low: float
    wrong_high: float
    wrong_low: float
    outside_without_advantage: float
    clip_dual: float
    removed: float
    beyond_twice: float
    clip_floor: float
    k1: float
    k3: float
    removed_min: float  # of a step
    removed_max: float
    ratio_min: float
    ratio_max: float
    removed_mass: float  # mean over the steps; NaN at the record level `lean`


def over_all_steps(by_step: pd.DataFrame) -> RunClipping:
    """Return the numbers of a whole run, from the rows `all` of `clip_step`."""
    steps = _steps_taken(by_step)
    averaged = (*FLAGS, "beyond_twice", "clip_floor", *ESTIMATES)
    means = {name: float(np.average(steps[name], weights=steps["n_tokens"])) for name in averaged}
    return RunClipping(
        n_tokens=int(steps["n_tokens"].sum()),
        n_steps=len(steps),
        n_iterations=steps["iteration"].nunique(),
        removed_min=float(steps["removed"].min()),
        removed_max=float(steps["removed"].max()),
        ratio_min=float(steps["ratio_min"].min()),
        ratio_max=float(steps["ratio_max"].max()),
        removed_mass=float(steps["removed_mass"].mean()),
        **means,
    )
