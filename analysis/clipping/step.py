"""Table `clip_step`: one row per iteration, epoch, minibatch and subset of tokens."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.clipping.flags import FLAGS, flags_of_ratios, ratios_of, token_flags, value_flags
from analysis.clipping.update_rows import Bool, ClipRule, Float64, IterationRows, column, policy_rows, steps_of
from analysis.clipping.weights import surrogate_mass
from ppo_repro.config.run import RunConfig

VALUE_FLAGS = ("vf_band_out", "vf_grad_zero")
SUBSETS = ("all", "adv_pos", "adv_neg", "word_start", "continuation")
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
NAN = float("nan")


def overshoot(ratios: Float64, rule: ClipRule) -> Float64:
    """How far a ratio lies outside the band: max(0, r - (1 + high), (1 - low) - r), float64; NaN stays NaN."""
    return np.maximum(0.0, np.maximum(ratios - (1.0 + rule.high), (1.0 - rule.low) - ratios))


def effective_samples(log_weights: Float64) -> float:
    """(sum w)^2 / (n sum w^2) in [1/n, 1] for w = exp(log_weights); weights are shifted so that none overflows."""
    if not len(log_weights) or not np.isfinite(log_weights).all():
        return NAN
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def kl_estimates(log_ratios: Float64) -> dict[str, float]:
    """KL(anchor || new), token_mean, nats, from tokens of the anchor: k1 = -x, k2 = x^2 / 2, k3 = expm1(x) - x.

    x = log_ratios, at least one. Schulman, "Approximating KL Divergence", 2020.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        estimates = {"k1": -log_ratios, "k2": log_ratios**2 / 2.0, "k3": np.expm1(log_ratios) - log_ratios}
        return {f"kl_{name}": float(values.mean()) for name, values in estimates.items()}


def mismatch(rows: pd.DataFrame, rule: ClipRule) -> dict[str, float]:
    """clip_floor, clip_floor_band: shares of grad_zero and band_out at the ratio pi_old / anchor, before any step.

    Both are 0 with the anchor `old`. var_share_mismatch = Var(delta) / Var(log pi_new - log pi_rollout) with
    delta = log pi_old - log pi_rollout; NaN where nothing varies.
    """
    old, rollout = column(rows, "old_logprobs"), column(rows, "rollout_logprobs")
    unmoved = ratios_of(old - column(rows, "anchor_logprobs"))
    flags = flags_of_ratios(unmoved, column(rows, "advantages"), rule)
    with np.errstate(invalid="ignore"):  # infinite log-probs make it NaN
        total = float(np.var(column(rows, "new_logprobs") - rollout))
    return {
        "clip_floor": float(flags["grad_zero"].mean()),
        "clip_floor_band": float(flags["band_out"].mean()),
        "var_share_mismatch": float(np.var(old - rollout)) / total if total else NAN,
    }


def _numbers(rows: pd.DataFrame, flags: pd.DataFrame, mass: Float64, rule: ClipRule) -> dict[str, float]:
    """One row of the table, over these tokens; only n_tok if there are none."""
    if not len(rows):
        return {"n_tok": 0}
    ratios, log_ratios = column(flags, "ratio"), column(rows, "log_ratios")
    finite = np.isfinite(ratios).all()
    over = overshoot(ratios, rule) if finite else np.array([NAN])
    shown = ratios if finite else np.array([NAN])
    beyond = (ratios > 1.0 + 2.0 * rule.high) | (ratios < 1.0 - 2.0 * rule.low)
    rates = {name: float(flags[name].mean()) for name in FLAGS}
    floor, total = mismatch(rows, rule), float(mass.sum())
    codes = np.unique(rows["sequence"].to_numpy(), return_inverse=True)[1]
    return {
        "n_tok": len(rows),
        "n_adv_zero": int((column(rows, "advantages") == 0).sum()),
        "n_nonfinite": int(np.count_nonzero(~np.isfinite(log_ratios))),
        **rates,
        **{"r_mean": shown.mean(), "r_var": shown.var(), "r_min": shown.min(), "r_max": shown.max()},
        **{f"r_q{q:g}": value for q, value in zip(QUANTILES, np.quantile(shown, QUANTILES), strict=True)},
        **{"overshoot_mean": over.mean(), "overshoot_p99": np.quantile(over, 0.99), "overshoot_max": over.max()},
        "overshoot_beyond_range": float(beyond.mean()),
        **kl_estimates(log_ratios),
        "ess_tok": effective_samples(log_ratios),
        "ess_seq": effective_samples(np.asarray(np.bincount(codes, log_ratios), dtype=np.float64)),
        "gm_clip": float(mass[flags["grad_zero"]].sum()) / total if total and np.isfinite(total) else NAN,
        **floor,
        "clip_excess": rates["grad_zero"] - floor["clip_floor"],
    }


def _subsets(rows: pd.DataFrame) -> dict[str, Bool]:
    advantages, start = column(rows, "advantages"), rows["sub_idx"].to_numpy() == 0
    everything = np.ones(len(rows), dtype=bool)
    return dict(zip(SUBSETS, (everything, advantages > 0, advantages < 0, start, ~start), strict=True))


def clip_step(item: IterationRows, config: RunConfig) -> pd.DataFrame:
    """One row per step and subset: rates of every flag, ratios, overshoot, KL, effective samples, gradient mass.

    Rates are shares of the subset's tokens; NaN where it has none, or where the policy took no step. gm_clip is the
    share of the surrogate mass sum w |r A| that the clip removed. overshoot_beyond_range: share whose overshoot is
    larger than the clip range on its side. clip_excess = grad_zero - clip_floor: what the optimizer caused. See FLAGS,
    `value_flags`, `kl_estimates` and `mismatch` for the others.
    """
    policy = policy_rows(item)
    flags, mass = token_flags(policy, item.rule), surrogate_mass(policy, config, item.tokens)
    values = value_flags(item.rows, item.rule)
    has_value, policy_subsets, subsets = item.rows["new_values"].notna(), _subsets(policy), _subsets(item.rows)
    policy_steps, all_steps = steps_of(policy), steps_of(item.rows)
    table = []
    for inner, step in enumerate(zip(item.steps["epoch"], item.steps["minibatch"], strict=True)):
        of_policy, of_all = policy_steps.get(step, np.zeros(0, np.intp)), all_steps[step]
        for subset in SUBSETS:
            chosen = of_policy[policy_subsets[subset][of_policy]]
            key = {"iteration": item.iteration, "epoch": step[0], "minibatch": step[1], "step": inner, "subset": subset}
            numbers = _numbers(policy.iloc[chosen], flags.iloc[chosen], mass[chosen], item.rule)
            stepped = of_all[(subsets[subset] & has_value.to_numpy())[of_all]]
            rates = {name: values[name].iloc[stepped].mean() for name in VALUE_FLAGS}
            table.append({**key, **numbers, "n_value_tok": len(stepped), **rates})
    return pd.DataFrame(table)
