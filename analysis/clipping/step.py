"""Table `clip_step`: one row per iteration, epoch, minibatch and subset of tokens."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.clipping.flags import FLAGS, flags_of_ratios, ratios_of, token_flags, value_flags
from analysis.clipping.update_rows import Bool, ClipRule, Float64, IterationRows, column, policy_rows, steps_of
from analysis.clipping.weights import masses
from ppo_repro.config.run import RunConfig

VALUE_FLAGS = ("vf_band_out", "vf_grad_zero")
NEEDED = ["sequence", "sub_idx", "advantages", "log_ratios", "new_logprobs", "anchor_logprobs", "old_logprobs",
          "rollout_logprobs"]  # fmt: skip
SUBSETS = ("all", "adv_pos", "adv_neg", "word_start", "continuation")
QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)


def overshoot(ratios: Float64, rule: ClipRule) -> Float64:
    """How far a ratio lies outside the band: max(0, r - (1 + high), (1 - low) - r), float64; NaN stays NaN."""
    return np.maximum(0.0, np.maximum(ratios - (1.0 + rule.high), (1.0 - rule.low) - ratios))


def beyond_twice(ratios: Float64, rule: ClipRule) -> Bool:
    """Whether the overshoot is larger than the clip range on its side."""
    return (ratios > 1.0 + 2.0 * rule.high) | (ratios < 1.0 - 2.0 * rule.low)


def share(values: Float64, where: Bool) -> float:
    """The share of the values' sum that lies at `where`; NaN where the sum is zero or not finite."""
    total = float(values.sum())
    return float(values[where].sum()) / total if total and np.isfinite(total) else float("nan")


def effective_samples(log_weights: Float64) -> float:
    """(sum w)^2 / (n sum w^2) in [1/n, 1] for w = exp(log_weights); weights are shifted so that none overflows."""
    if not len(log_weights) or not np.isfinite(log_weights).all():
        return float("nan")
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def kl_estimates(log_ratios: Float64) -> dict[str, float]:
    """KL(anchor || new), token_mean, nats, from tokens of the anchor: k1 = -x, k2 = x^2 / 2, k3 = expm1(x) - x.

    x = log_ratios. Schulman, "Approximating KL Divergence", 2020.
    """
    if not len(log_ratios):
        return dict.fromkeys(("kl_k1", "kl_k2", "kl_k3"), float("nan"))
    with np.errstate(over="ignore", invalid="ignore"):
        k3 = np.expm1(log_ratios) - log_ratios
        return {
            "kl_k1": float(-log_ratios.mean()),
            "kl_k2": float((log_ratios**2).mean() / 2.0),
            "kl_k3": float(k3.mean()),
        }


def ratio_statistics(ratios: Float64) -> dict[str, float]:
    """Mean, population variance, smallest, largest and quantiles (linear interpolation) of the ratios."""
    names = ["r_mean", "r_var", "r_min", "r_max", *(f"r_q{level:g}" for level in QUANTILES)]
    if not len(ratios) or not np.isfinite(ratios).all():
        return dict.fromkeys(names, float("nan"))
    values = [ratios.mean(), ratios.var(), ratios.min(), ratios.max(), *np.quantile(ratios, QUANTILES)]
    return {name: float(value) for name, value in zip(names, values, strict=True)}


def mismatch(rows: pd.DataFrame, rule: ClipRule) -> dict[str, float]:
    """clip_floor, clip_floor_band: shares of grad_zero and band_out at the ratio pi_old / anchor, before any step.

    Both are 0 with the anchor `old`. var_share_mismatch = Var(delta) / Var(log pi_new - log pi_rollout) with
    delta = log pi_old - log pi_rollout; NaN where nothing varies.
    """
    if not len(rows):
        return dict.fromkeys(("clip_floor", "clip_floor_band", "var_share_mismatch"), float("nan"))
    old, rollout = column(rows, "old_logprobs"), column(rows, "rollout_logprobs")
    unmoved = ratios_of(old - column(rows, "anchor_logprobs"))
    flags = flags_of_ratios(unmoved, column(rows, "advantages"), rule)
    with np.errstate(invalid="ignore"):  # infinite log-probs make it NaN
        total = float(np.var(column(rows, "new_logprobs") - rollout))
    return {
        "clip_floor": float(flags["grad_zero"].mean()),
        "clip_floor_band": float(flags["band_out"].mean()),
        "var_share_mismatch": float(np.var(old - rollout)) / total if total else float("nan"),
    }


def _summary(rows: pd.DataFrame, flags: pd.DataFrame, mass: pd.DataFrame, rule: ClipRule) -> dict[str, float]:
    """The numbers of one row of the table, over these tokens."""
    n, ratios, log_ratios = len(rows), column(flags, "ratio"), column(rows, "log_ratios")
    rates = {name: float(flags[name].mean()) if n else float("nan") for name in FLAGS}
    over = overshoot(ratios, rule)
    finite = n > 0 and bool(np.isfinite(over).all())
    cut = flags["grad_zero"].to_numpy(bool)
    _, codes = np.unique(rows["sequence"].to_numpy(), return_inverse=True)
    floor = mismatch(rows, rule)
    return {
        "n_tok": n,
        "n_adv_zero": int((column(rows, "advantages") == 0).sum()),
        "n_nonfinite": int(np.count_nonzero(~np.isfinite(log_ratios))),
        **rates,
        **ratio_statistics(ratios),
        "overshoot_mean": float(over.mean()) if finite else float("nan"),
        "overshoot_p99": float(np.quantile(over, 0.99)) if finite else float("nan"),
        "overshoot_max": float(over.max()) if finite else float("nan"),
        "overshoot_beyond_range": float(beyond_twice(ratios, rule).mean()) if n else float("nan"),
        **kl_estimates(log_ratios),
        "ess_tok": effective_samples(log_ratios),
        "ess_seq": effective_samples(np.asarray(np.bincount(codes, log_ratios), dtype=np.float64)),
        "gm_clip": share(column(mass, "surrogate_mass"), cut),
        "lgn_share_clip": share(column(mass, "logit_grad_norm"), cut),
        **floor,
        "clip_excess": rates["grad_zero"] - floor["clip_floor"],
    }


def _subsets(rows: pd.DataFrame) -> dict[str, Bool]:
    advantages, start = column(rows, "advantages"), rows["sub_idx"].to_numpy() == 0
    everything = np.ones(len(rows), dtype=bool)
    return dict(zip(SUBSETS, (everything, advantages > 0, advantages < 0, start, ~start), strict=True))


def _value_rates(flags: pd.DataFrame, where: Bool) -> dict[str, float]:
    """Share of tokens of the value model's step with each flag; NaN where it took none."""
    stepped = where & flags["seen"].to_numpy(bool)
    count = int(stepped.sum())
    rates = {name: flags[name].to_numpy(bool)[stepped].mean() if count else np.nan for name in VALUE_FLAGS}
    return {"n_value_tok": count, **rates}


def clip_step(item: IterationRows, config: RunConfig) -> pd.DataFrame:
    """One row per step and subset: rates of every flag, ratios, overshoot, KL, effective samples, gradient mass.

    Rates are shares of the subset's tokens; NaN where it has none, or where the policy took no step. gm_clip is
    the share of the surrogate mass sum w |r A|, lgn_share_clip that of the logit-gradient norms, that the clip
    removed. clip_excess = grad_zero - clip_floor. See FLAGS, `kl_estimates`, `mismatch` for the others.
    """
    policy = policy_rows(item)
    flags, mass = token_flags(policy, item.rule), masses(policy, config, item.tokens)
    value_rows = value_flags(item.rows, item.rule).assign(seen=item.rows["new_values"].notna())
    policy_steps, all_steps = steps_of(policy), steps_of(item.rows)
    policy = policy[NEEDED]
    table = []
    for inner, (epoch, minibatch) in enumerate(zip(item.steps["epoch"], item.steps["minibatch"], strict=True)):
        policy_index, all_index = (
            policy_steps.get((epoch, minibatch), np.zeros(0, np.intp)),
            all_steps[(epoch, minibatch)],
        )
        subsets, value_subsets = _subsets(policy.iloc[policy_index]), _subsets(item.rows.iloc[all_index])
        for subset in SUBSETS:
            selected = policy_index[subsets[subset]]
            key = {"iteration": item.iteration, "epoch": epoch, "minibatch": minibatch, "step": inner, "subset": subset}
            numbers = _summary(policy.iloc[selected], flags.iloc[selected], mass.iloc[selected], item.rule)
            table.append({**key, **numbers, **_value_rates(value_rows.iloc[all_index], value_subsets[subset])})
    return pd.DataFrame(table)
