"""verl's `rollout_corr/*`: the sampler against the trainer before the update, importance weights per token.

Of the rejection keys (`rollout_rs_*`), which exist only where a rule is configured, token_k1's share is derived.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.clipping.update_rows import Float64, IterationRows
from analysis.dialects.definition import Definition, Source
from analysis.dialects.steps import Responses, by_response, exp, one_row, responses
from ppo_repro.errors import UserError

SAFETY_BOUND = 20.0  # on log-ratios before they are exponentiated
_HELPER = Source(
    "volcengine/verl", "verl/trainer/ppo/rollout_corr_helper.py", "e1904109a3a83d7c911baaf8998b9188b4cf7874"
)
_PAIR = "old and rollout"
_SAFE = f"log-ratio clamped to +-{SAFETY_BOUND:g}"

DEFINITIONS = tuple(
    Definition(f"rollout_corr/{name}", _HELPER, formula, _PAIR, reduction, difference)
    for name, formula, reduction, difference in (
        ("kl", "mean(g - p)", "token mean", "k1 of KL(rollout || old), any sign"),
        ("k3_kl", "mean(exp(x) - x - 1), x = p - g", "token mean", "k3; no expm1: in float32 noise for small x"),
        ("training_ppl", "mean(exp(-mean_t p))", "mean over responses", "mean of perplexities, not exp of the mean"),
        ("training_log_ppl", "mean(-mean_t p)", "seq_mean_token_mean", "not the token mean"),
        ("rollout_ppl", "mean(exp(-mean_t g))", "mean over responses", "as training_ppl"),
        ("rollout_log_ppl", "mean(-mean_t g)", "seq_mean_token_mean", "as training_log_ppl"),
        ("log_ppl_diff", "mean(mean_t g - mean_t p)", "seq_mean_token_mean", "k1 per response, not token mean"),
        ("log_ppl_abs_diff", "mean |mean_t g - mean_t p|", "mean over responses", "errors cancel within a response"),
        ("log_ppl_diff_max", "max(mean_t g - mean_t p)", "maximum over responses", ""),
        ("log_ppl_diff_min", "min(mean_t g - mean_t p)", "minimum over responses", ""),
        ("ppl_ratio", "mean(exp(mean_t g - mean_t p))", "mean over responses", "inverse geometric-mean ratio"),
        ("chi2_token", "mean(w^2) - 1, w = exp(p - g)", "token mean", f"may be negative in a sample; {_SAFE}"),
        ("chi2_seq", "mean(exp(2 sum_t(p - g))) - 1", "mean over responses", f"may be negative; sum {_SAFE}"),
        ("rollout_is_mean", "mean(w)", "token mean", f"before truncation; {_SAFE}"),
        ("rollout_is_max", "max(w)", "over tokens", _SAFE),
        ("rollout_is_min", "min(w)", "over tokens", _SAFE),
        ("rollout_is_ratio_fraction_high", "mean(w > C)", "token mean", ""),
        ("rollout_is_ratio_fraction_low", "mean(w < 1/C)", "token mean", ""),
        ("rollout_is_std", "std of clip(w, 1/C, C)", "population, over tokens", "of clamped weights: too small"),
        (
            "rollout_is_eff_sample_size",
            "1 / mean((v / (mean v + 1e-8))^2), v = clip(w, 1/C, C)",
            "over tokens",
            "our ess_tok formula on clamped weights: optimistic",
        ),
        ("rollout_is_batch_norm_factor", "mean(min(w, C))", "token mean", "the weights are divided by it"),
        (
            "rollout_rs_token_k1_masked_fraction",
            "mean(-log w < log(1/C) or -log w > log C)",
            "token mean",
            f"bounds on -log w, so one-sided bounds are inverted; {_SAFE}",
        ),
        ("rollout_is_seq_mean", "mean over responses of mean_t w", "seq_mean_token_mean", "arithmetic, not product"),
        ("rollout_is_seq_std", "sample std over responses of mean_t w", "over responses", "0 with one response"),
        ("rollout_is_seq_max", "max of mean_t w", "over responses", ""),
        ("rollout_is_seq_min", "min of mean_t w", "over responses", ""),
        ("rollout_is_seq_max_deviation", "max |mean_t w - 1|", "over responses", ""),
        ("rollout_is_seq_fraction_high", "mean(mean_t w > C)", "over responses", ""),
        ("rollout_is_seq_fraction_low", "mean(mean_t w < 1/C)", "over responses", ""),
    )
)


def metrics(item: IterationRows, threshold: float = 2.0) -> pd.DataFrame:
    """One row: verl's keys for this iteration, `rollout_is` at token level with C = threshold.

    Raises UserError for a threshold that is not above 1.
    """
    if not 1.0 < threshold < np.inf:
        raise UserError(f"threshold = {threshold:g}: must be greater than 1, an upper bound on importance weights")
    before = responses(item)
    numbers = {**_off_policy(before), **_weights(before, threshold)}
    return one_row(item, {f"rollout_corr/{name}": value for name, value in numbers.items()})


def _safe(values: Float64) -> Float64:
    return np.clip(values, -SAFETY_BOUND, SAFETY_BOUND)


def _off_policy(before: Responses) -> dict[str, float]:
    log_ratio = before.old - before.rollout
    sums, _ = by_response(log_ratio, before.sequence)
    _, trained = by_response(before.old, before.sequence)
    _, sampled = by_response(before.rollout, before.sequence)
    difference = sampled - trained
    return {
        "kl": float((-log_ratio).mean()),
        "k3_kl": float((exp(log_ratio) - log_ratio - 1.0).mean()),
        "training_ppl": float(exp(-trained).mean()),
        "training_log_ppl": float((-trained).mean()),
        "rollout_ppl": float(exp(-sampled).mean()),
        "rollout_log_ppl": float((-sampled).mean()),
        "log_ppl_diff": float(difference.mean()),
        "log_ppl_abs_diff": float(np.abs(difference).mean()),
        "log_ppl_diff_max": float(difference.max()),
        "log_ppl_diff_min": float(difference.min()),
        "ppl_ratio": float(exp(difference).mean()),
        "chi2_token": float((exp(_safe(log_ratio)) ** 2).mean()) - 1.0,
        "chi2_seq": float(exp(2.0 * _safe(sums)).mean()) - 1.0,
    }


def _weights(before: Responses, threshold: float) -> dict[str, float]:
    weights = exp(_safe(before.old - before.rollout))
    clamped = np.clip(weights, 1.0 / threshold, threshold)
    spread = float((clamped**2).mean() - clamped.mean() ** 2)
    normalised = clamped / (clamped.mean() + 1e-8)
    _, means = by_response(weights, before.sequence)
    return {
        "rollout_is_mean": float(weights.mean()),
        "rollout_is_max": float(weights.max()),
        "rollout_is_min": float(weights.min()),
        "rollout_is_ratio_fraction_high": float((weights > threshold).mean()),
        "rollout_is_ratio_fraction_low": float((weights < 1.0 / threshold).mean()),
        "rollout_is_std": max(spread, 0.0) ** 0.5 if len(weights) > 1 else 0.0,
        "rollout_is_eff_sample_size": 1.0 / float((normalised**2).mean()),
        "rollout_is_batch_norm_factor": float(np.minimum(weights, threshold).mean()),
        "rollout_rs_token_k1_masked_fraction": float(((weights > threshold) | (weights < 1.0 / threshold)).mean()),
        "rollout_is_seq_mean": float(means.mean()),
        "rollout_is_seq_std": float(means.std(ddof=1)) if len(means) > 1 else 0.0,
        "rollout_is_seq_max": float(means.max()),
        "rollout_is_seq_min": float(means.min()),
        "rollout_is_seq_max_deviation": float(np.abs(means - 1.0).max()),
        "rollout_is_seq_fraction_high": float((means > threshold).mean()),
        "rollout_is_seq_fraction_low": float((means < 1.0 / threshold).mean()),
    }
