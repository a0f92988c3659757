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
    Flags,
    ValueFlags,
    clipped_at_start,
    column,
    ratios_of,
    share,
    token_flags,
    value_flags,
)
from ppo_repro.analysis.clip_rules import ClipRule, counted_rule, value_reach
from ppo_repro.analysis.run_tables import run_tables
from ppo_repro.base.errors import UserError
from ppo_repro.records.logprob_pairs import KEY_IN_ITERATION
from ppo_repro.statistics.clusters import Floats, effective_share
from ppo_repro.statistics.kl import k1, k3

STEP_KEY = ["epoch", "minibatch"]
CLIP_TOKEN_COLUMNS = [
    *("iteration", "sequence", "position", "rollout_logprobs", "old_logprobs", "entropies"),
    *("values", "advantages", "returns"),
]

SUBSETS = {"all": 0, "adv_pos": 1, "adv_neg": -1}  # the sign of the advantages; 0 for any


@dataclass(frozen=True)
class IterationRows:
    """Tables of one iteration: its steps, and one row per step and token."""

    iteration: int
    rule: ClipRule
    value_reach: float
    steps: pd.DataFrame  # epoch, minibatch in order
    rows: pd.DataFrame  # rows of `join_tokens`


def join_tokens(tokens: pd.DataFrame, updates: pd.DataFrame, anchor: str) -> pd.DataFrame:
    """Return the rows of `updates`, in their order, with the columns CLIP_TOKEN_COLUMNS of their token and two more.

    anchor_logprobs are the log-probs of the anchor, and log_ratios = new_logprobs - anchor_logprobs; both are float64,
    nats. Raises UserError if a row has no token.
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
    tables = run_tables(run_dir, iterations)
    config = tables.config
    for _, summary in tables.read("iterations").iterrows():
        iteration = int(summary["iteration"])
        rule = counted_rule(config.ppo, float(summary["clip_range"]), band)
        tokens = tables.read("tokens", CLIP_TOKEN_COLUMNS, iteration)
        updates = tables.read("updates", iteration=iteration).drop(columns="iteration")
        yield IterationRows(
            iteration=iteration,
            rule=rule,
            value_reach=value_reach(config.value, float(summary["return_scale"])),
            steps=tables.read("steps", STEP_KEY, iteration),
            rows=join_tokens(tokens, updates, rule.anchor),
        )


def policy_rows(loaded: IterationRows) -> pd.DataFrame:
    """Return the rows of the steps in which the policy was updated."""
    return loaded.rows[loaded.rows["clip_flag"].notna()]


def _value_rows(loaded: IterationRows) -> pd.DataFrame:
    """Return the rows of the steps in which the value model was updated."""
    return loaded.rows[loaded.rows["new_values"].notna()]


# the tables of one iteration


def effective_samples(log_weights: Floats) -> float:
    """Return the effective sample size per sample for the weights exp(log_weights); NaN if one is not finite.

    The largest log-weight is first subtracted, which cancels in the quotient and prevents overflow.
    """
    if not len(log_weights) or not np.isfinite(log_weights).all():
        return math.nan
    weights = np.exp(log_weights - log_weights.max())
    return effective_share(float(weights.sum()), float((weights**2).sum()), len(weights))


class KlEstimates(NamedTuple):
    """Estimates of KL(anchor || new), token means, nats; NaN without tokens."""

    k1: float
    k3: float


ESTIMATES = KlEstimates._fields


def kl_estimates(log_ratios: Floats) -> KlEstimates:
    """Estimate KL(anchor || new) from the log-ratios of tokens that the anchor sampled."""
    if not len(log_ratios):
        return KlEstimates(math.nan, math.nan)
    with np.errstate(invalid="ignore"):  # infinities of both signs
        return KlEstimates(k1=float(k1(-log_ratios).mean()), k3=float(k3(-log_ratios).mean()))


def surrogate_mass(rows: pd.DataFrame) -> Floats:
    """Return w |r A| of each row of a policy step, float64, without the clip; NaN at the record level `lean`.

    w is the recorded weight of the token in the loss of its step, times its importance weight if the run has them.
    """
    weights = column(rows, "loss_weights") * rows["importance_weights"].astype(np.float64).fillna(1.0).to_numpy()
    return weights * np.abs(ratios_of(column(rows, "log_ratios")) * column(rows, "advantages"))


def _is_in(subset: str, rows: pd.DataFrame) -> Bool:
    sign = SUBSETS[subset]
    return (sign * column(rows, "advantages") > 0) | (sign == 0)


class SubsetOfStep(NamedTuple):
    """A subset of the tokens of an optimizer step: the first columns of `clip_step`."""

    iteration: int
    epoch: int
    minibatch: int
    step: int  # of the iteration, from 0
    subset: str  # of SUBSETS


class ClipNumbers(NamedTuple):
    """Numbers of the tokens of a subset: columns of `clip_step`. All but the counts are NaN without tokens."""

    n_tokens: int  # 0 if the policy took no step
    n_nonfinite: int
    ratio_mean: float  # NaN, like the next two, if a ratio is not finite
    ratio_min: float
    ratio_max: float
    beyond_twice: float  # share of tokens beyond twice the clip range
    k1: float  # of `kl_estimates`
    k3: float
    ess_frac: float  # of `effective_samples`
    removed_mass: float  # share of the sum of `surrogate_mass` that the clip removed
    clip_floor: float  # share of tokens in `clipped_at_start`
    n_value_tokens: int  # 0 if the value model took no step
    value_outside: float  # shares of `value_flags`
    value_removed: float


def _numbers(tokens: pd.DataFrame, flags: Flags[Bool], values: ValueFlags, rule: ClipRule) -> ClipNumbers:
    """Return the numbers of rows of a policy step with their flags, and of the same subset of a value step."""
    log_ratios, mass = column(tokens, "log_ratios"), surrogate_mass(tokens)
    ratios, estimates = ratios_of(log_ratios), kl_estimates(log_ratios)
    shown = ratios if len(ratios) and np.isfinite(ratios).all() else np.array([math.nan])
    total = float(mass.sum())
    return ClipNumbers(
        n_tokens=len(tokens),
        n_nonfinite=int(np.count_nonzero(~np.isfinite(log_ratios))),
        ratio_mean=float(shown.mean()),
        ratio_min=float(shown.min()),
        ratio_max=float(shown.max()),
        beyond_twice=share((ratios > 1.0 + 2.0 * rule.high) | (ratios < 1.0 - 2.0 * rule.low)),
        k1=estimates.k1,
        k3=estimates.k3,
        ess_frac=effective_samples(log_ratios),
        removed_mass=float(mass[flags.removed].sum()) / total if total and np.isfinite(total) else math.nan,
        clip_floor=share(clipped_at_start(tokens, rule)),
        n_value_tokens=len(values.value_outside),
        value_outside=share(values.value_outside),
        value_removed=share(values.value_removed),
    )


def clip_step(loaded: IterationRows) -> pd.DataFrame:
    """Return a row per step and subset of its tokens: a `SubsetOfStep`, its `ClipNumbers` and its share of each flag.

    The subsets are all tokens, tokens with A > 0 and tokens with A < 0. A share is of the tokens of the subset.
    """
    policy, value = policy_rows(loaded), _value_rows(loaded)
    policy_steps, value_steps = policy.groupby(STEP_KEY).indices, value.groupby(STEP_KEY).indices
    rows = []
    for number, step in enumerate(zip(loaded.steps["epoch"], loaded.steps["minibatch"], strict=True)):
        policy_step, value_step = policy.iloc[policy_steps.get(step, [])], value.iloc[value_steps.get(step, [])]
        for subset in SUBSETS:
            tokens = policy_step[_is_in(subset, policy_step)]
            values = value_flags(value_step[_is_in(subset, value_step)], loaded.value_reach)
            flags = token_flags(tokens, loaded.rule)
            key = SubsetOfStep(loaded.iteration, *step, number, subset)
            rows.append((*key, *_numbers(tokens, flags, values, loaded.rule), *map(share, flags)))
    return pd.DataFrame(rows, columns=[*SubsetOfStep._fields, *ClipNumbers._fields, *FLAGS])


class ClipBucket(NamedTuple):
    """Tokens of policy steps in a bucket [lo, hi): the first columns of `clip_bucket`."""

    iteration: int
    kind: str  # prob (under the anchor), entropy or position
    subset: str  # of SUBSETS
    lo: float
    hi: float  # which the last bucket of a kind includes
    n_tokens: int


def clip_bucket(loaded: IterationRows) -> pd.DataFrame:
    """Return a row per `ClipBucket` that has tokens, with its share of each flag; a value of NaN is in no bucket."""
    tokens = policy_rows(loaded)
    flags = token_flags(tokens, loaded.rule)
    kinds = {
        "prob": (np.exp(column(tokens, "anchor_logprobs")), PROBABILITIES),
        "entropy": (column(tokens, "entropies"), ENTROPIES),
        "position": (column(tokens, "position"), DOUBLING),
    }
    rows = []
    for kind, (values, edges) in kinds.items():
        codes = bucket_of(values, edges)
        for subset in SUBSETS:
            is_in = _is_in(subset, tokens) & (codes >= 0)
            for code in np.unique(codes[is_in]):
                chosen = is_in & (codes == code)
                bucket = ClipBucket(loaded.iteration, kind, subset, edges[code], edges[code + 1], int(chosen.sum()))
                rows.append((*bucket, *(share(flag[chosen]) for flag in flags)))
    return pd.DataFrame(rows, columns=[*ClipBucket._fields, *FLAGS])


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
    for loaded in load_iterations(run_dir, iterations=iterations, band=band):
        steps.append(clip_step(loaded))
        buckets.append(clip_bucket(loaded))
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

    The rows `all` of `clip_step` have the `KlEstimates`. The records cannot say what would have followed a stop. Raises
    UserError for a target that is not positive.
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
    outside: float  # a field for each of FLAGS
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
    return RunClipping(
        n_tokens=int(steps["n_tokens"].sum()),
        n_steps=len(steps),
        n_iterations=steps["iteration"].nunique(),
        removed_min=float(steps["removed"].min()),
        removed_max=float(steps["removed"].max()),
        ratio_min=float(steps["ratio_min"].min()),
        ratio_max=float(steps["ratio_max"].max()),
        removed_mass=float(steps["removed_mass"].mean()),
        **{name: float(np.average(steps[name], weights=steps["n_tokens"])) for name in averaged},
    )
