"""TRL: the PPO trainer's keys, some of them means that include padding, and the GRPO trainer's clip and sampling keys.

Assumed: one process, one micro-batch per minibatch, responses padded on the right to the longest of the iteration.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.clipping.update_rows import IterationRows
from analysis.dialects.definition import Definition, Source
from analysis.dialects.steps import by_response, exp, mean, one_row, policy_steps, responses, step_rows
from ppo_repro.errors import UserError

INVALID_LOGPROB = 1.0  # what TRL writes at padding, in old and new log-probs alike
_PPO = Source("huggingface/trl", "trl/experimental/ppo/ppo_trainer.py", "0062ee10a9bc59dbb7ba244f3bbaf2e81f25196f")
_GRPO = Source("huggingface/trl", "trl/trainer/grpo_trainer.py", "d2b69d769dab6f77acbfd33252bcd7d22765571b")
_LATER = Source("huggingface/trl", "trl/trainer/grpo_trainer.py", "main, read in a derived copy")
_STEPS = "then mean over all steps"
_PADDED = f"sum over real tokens / (responses x longest response), {_STEPS}"

DEFINITIONS = (
    Definition(
        "policy/approxkl_avg",
        _PPO,
        "0.5 mean((n - g)^2)",
        "rollout",
        _PADDED,
        "k2, and padding counts as 0: smaller than the token mean by the share of padding",
    ),
    Definition(
        "policy/clipfrac_avg",
        _PPO,
        "masked_mean(-clip(r) A > -r A)",
        "rollout",
        f"token mean, {_STEPS}",
        "grad_zero without dual clip; NaN if the range is asymmetric, which this trainer does not have",
    ),
    Definition("val/ratio", _PPO, "mean(r)", "rollout", _PADDED, "padding counts as ratio 1"),
    Definition(
        "val/ratio_var",
        _PPO,
        "var over steps of mean(r)",
        "rollout",
        "sample variance of the steps' padded means",
        "not the variance of the ratios: it says next to nothing about their spread",
    ),
    Definition(
        "objective/kl",
        _PPO,
        "mean(sum_t(g - ref))",
        "rollout and ref",
        "seq_mean_token_sum",
        "k1 of KL(policy || reference), unclamped (kl_estimator k1, the default); padding adds 0",
    ),
    Definition(
        "objective/entropy",
        _PPO,
        "mean(sum_t(-g))",
        "rollout",
        "seq_mean_token_sum, padding included",
        f"minus {INVALID_LOGPROB:g} for every padded position: falls as responses get more uneven",
    ),
    Definition(
        "policy/entropy_avg",
        _PPO,
        "mean(entropy)",
        "none",
        "padding included",
        "needs the entropy at padded positions, which no record has",
        is_derived=False,
    ),
    Definition(
        "val/clipfrac_avg",
        _PPO,
        "masked_mean((v_clip - R)^2 > (v - R)^2)",
        "none",
        "over real tokens, and one more position of each response shorter than the longest",
        "needs values one position after the end, which no record has",
        is_derived=False,
    ),
    *(
        Definition(f"clip_ratio/{name}", _GRPO, formula, "old", "token mean of a step", said)
        for name, formula, said in (
            ("low_mean", "mean(r < 1 - eps_low and A < 0)", "clip_low"),
            ("low_min", "min over processes of low_mean", "equal to low_mean: one process"),
            ("high_mean", "mean(r > 1 + eps_high and A > 0)", "clip_high"),
            ("high_max", "max over processes of high_mean", "equal to high_mean: one process"),
            ("region_mean", "mean(either)", "grad_zero without dual clip"),
        )
    ),
    Definition(
        "cispo_clip_ratio",
        _LATER,
        "mean(r > epsilon_high and A > 0)",
        "old",
        "token mean of a step",
        "epsilon_high is a bound on r itself, 5 by default here; ours is 1 + clip_range_high",
    ),
    Definition(
        "sampling/sampling_logp_difference/mean", _LATER, "mean |p - g|", "old and rollout", "token mean", "nats"
    ),
    Definition("sampling/sampling_logp_difference/max", _LATER, "max |p - g|", "old and rollout", "maximum", "nats"),
    *(
        Definition(
            f"sampling/importance_sampling_ratio/{name}",
            _LATER,
            f"{name}(min(exp(p - g), cap))",
            "old and rollout",
            "over tokens (token_truncate)",
            "after truncation at cap, 2 by default here: what was cut off cannot be seen",
        )
        for name in ("min", "mean", "max")
    ),
)


def ppo_metrics(item: IterationRows) -> pd.DataFrame:
    """One row: the PPO trainer's keys for this iteration."""
    before, rule = responses(item), item.rule
    lengths = np.bincount(before.sequence)
    width = int(lengths.max())
    squares, clipped, ratios = [], [], []
    for step in policy_steps(item):
        cells = width * (int(step.sequence.max()) + 1)
        log_ratios = step.new - step.rollout
        ratio = exp(log_ratios)
        bounded = np.clip(ratio, 1.0 - rule.low, 1.0 + rule.high)
        squares.append(0.5 * float((log_ratios**2).sum()) / cells)
        clipped.append(float((-step.advantages * bounded > -step.advantages * ratio).mean()))
        ratios.append((float(ratio.sum()) + (cells - len(ratio))) / cells)
    kl, _ = by_response(before.rollout - before.ref, before.sequence)
    surprise, _ = by_response(-before.rollout, before.sequence)
    return one_row(
        item,
        {
            "policy/approxkl_avg": mean(squares),
            "policy/clipfrac_avg": mean(clipped) if rule.low == rule.high else float("nan"),
            "val/ratio": mean(ratios),
            "val/ratio_var": float(np.var(ratios, ddof=1)) if len(ratios) > 1 else float("nan"),
            "objective/kl": float(kl.mean()),
            "objective/entropy": float((surprise - INVALID_LOGPROB * (width - lengths)).mean()),
        },
    )


def grpo_metrics(item: IterationRows, cispo_epsilon_high: float = 5.0) -> pd.DataFrame:
    """One row per policy step: the GRPO trainer's clip keys. Raises UserError for a bound that is not positive."""
    if not cispo_epsilon_high > 0:
        raise UserError(f"cispo_epsilon_high = {cispo_epsilon_high:g}: must be positive, a bound on the ratio")
    rows = []
    for step in policy_steps(item):
        ratio = exp(step.new - step.old)
        low = (ratio < 1.0 - item.rule.low) & (step.advantages < 0)
        high = (ratio > 1.0 + item.rule.high) & (step.advantages > 0)
        numbers = {
            "clip_ratio/low_mean": float(low.mean()),
            "clip_ratio/low_min": float(low.mean()),
            "clip_ratio/high_mean": float(high.mean()),
            "clip_ratio/high_max": float(high.mean()),
            "clip_ratio/region_mean": float((low | high).mean()),
            "cispo_clip_ratio": float(((ratio > cispo_epsilon_high) & (step.advantages > 0)).mean()),
        }
        rows.append((step, numbers))
    return step_rows(item, rows)


def sampling_metrics(item: IterationRows, cap: float = 2.0) -> pd.DataFrame:
    """One row: the GRPO trainer's keys on sampler and trainer. Raises UserError for a cap that is not positive."""
    if not cap > 0:
        raise UserError(f"cap = {cap:g}: must be positive, a bound on importance ratios")
    before = responses(item)
    difference = np.abs(before.old - before.rollout)
    weights = np.minimum(exp(before.old - before.rollout), cap)
    return one_row(
        item,
        {
            "sampling/sampling_logp_difference/mean": float(difference.mean()),
            "sampling/sampling_logp_difference/max": float(difference.max()),
            "sampling/importance_sampling_ratio/min": float(weights.min()),
            "sampling/importance_sampling_ratio/mean": float(weights.mean()),
            "sampling/importance_sampling_ratio/max": float(weights.max()),
        },
    )
