"""What did the clip do in each optimizer step? Numbers of all its tokens, and of those with A > 0 and with A < 0."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd

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
from ppo_repro.analysis.clip_rules import ClipRule
from ppo_repro.analysis.visits import STEP_KEY, SUBSETS, IterationRows, in_subset, policy_rows, value_rows
from ppo_repro.statistics.clusters import Floats, effective_share
from ppo_repro.statistics.kl import k1, k3


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
    policy, value = policy_rows(loaded), value_rows(loaded)
    policy_steps, value_steps = policy.groupby(STEP_KEY).indices, value.groupby(STEP_KEY).indices
    rows = []
    for number, step in enumerate(zip(loaded.steps["epoch"], loaded.steps["minibatch"], strict=True)):
        policy_step, value_step = policy.iloc[policy_steps.get(step, [])], value.iloc[value_steps.get(step, [])]
        for subset in SUBSETS:
            tokens = policy_step[in_subset(subset, policy_step)]
            values = value_flags(value_step[in_subset(subset, value_step)], loaded.value_reach)
            flags = token_flags(tokens, loaded.rule)
            key = SubsetOfStep(loaded.iteration, *step, number, subset)
            rows.append((*key, *_numbers(tokens, flags, values, loaded.rule), *map(share, flags)))
    return pd.DataFrame(rows, columns=[*SubsetOfStep._fields, *ClipNumbers._fields, *FLAGS])
