"""verl: the keys of actor, critic and debugging. Those of `rollout_corr/` are in verl_rollout_corr.py.

Assumed: one process and one micro-batch per minibatch, so that the mean over logged values is the mean over steps.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.clipping.update_rows import IterationRows
from analysis.dialects.definition import Definition, Source
from analysis.dialects.steps import exp, mean, one_row, policy_steps, responses, value_steps

DUAL_CLIP = 3.0  # verl's default: it always applies one
LOG_RATIO_LIMIT = 20.0
_CORE = Source("verl-project/verl", "verl/trainer/ppo/core_algos.py", "018f23b5f83a13340421349e40ec42530739b23a")
_CRITIC = Source("volcengine/verl", "verl/trainer/ppo/core_algos.py", "26b5d6b2bbf0202683e49d9999f9174179ab5af3")
_DEBUG = Source("volcengine/verl", "verl/utils/debug/metrics.py", "123d744451bc4ac5072404fd6347a06249597a12")
_STEPS = "token mean, then mean over all steps"
_CLAMP = f"log-ratio clamped to +-{LOG_RATIO_LIMIT:g}"

DEFINITIONS = (
    Definition(
        "actor/pg_clipfrac", _CORE, "mean(-clip(r) A > -r A)", "old", _STEPS, f"grad_zero without dual clip; {_CLAMP}"
    ),
    Definition(
        "actor/pg_clipfrac_lower",
        _CORE,
        "mean(max(-r A, -clip(r) A) > -c A and A < 0)",
        "old",
        _STEPS,
        f"dual_zero; c = {DUAL_CLIP:g} where the run has no dual clip, since verl always has one",
    ),
    Definition("actor/ppo_kl", _CORE, "mean(p - n)", "old", _STEPS, f"k1 of KL(old || new), any sign; {_CLAMP}"),
    Definition(
        "critic/vf_clipfrac",
        _CRITIC,
        "mean((v_clip - R)^2 > (v - R)^2)",
        "none",
        _STEPS,
        "vf_grad_zero; v_clip = clip(v, v_old - eps, v_old + eps); NaN where the run clips no values",
    ),
    *(
        Definition(
            f"training/rollout_probs_diff_{name}",
            _DEBUG,
            f"{name}(|exp(p) - exp(g)|)",
            "old and rollout",
            "over tokens" + ("; sample standard deviation" if name == "std" else ""),
            "probabilities, though its docstring says logprob: small where probabilities are small",
        )
        for name in ("max", "mean", "std")
    ),
    Definition(
        "training/rollout_actor_probs_pearson_corr",
        _DEBUG,
        "Pearson correlation of exp(p) and exp(g)",
        "old and rollout",
        "over tokens",
        "probabilities, dominated by tokens near 0 and 1; NaN where one does not vary",
    ),
)


def metrics(item: IterationRows) -> pd.DataFrame:
    """One row: verl's actor, critic and debugging keys for this iteration."""
    rule, clip_range = item.rule, item.rule.value_range
    clipped, dual, kl, values = [], [], [], []
    limit = DUAL_CLIP if rule.dual is None else rule.dual
    for step in policy_steps(item):
        log_ratios = np.clip(step.new - step.old, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ratio, advantages = exp(log_ratios), step.advantages
        first = -advantages * ratio
        second = -advantages * np.clip(ratio, 1.0 - rule.low, 1.0 + rule.high)
        clipped.append(float((second > first).mean()))
        dual.append(float(((np.maximum(first, second) > -advantages * limit) & (advantages < 0)).mean()))
        kl.append(float((-log_ratios).mean()))
    for value_step in value_steps(item) if clip_range is not None else ():
        assert clip_range is not None
        new, old, returns = value_step.new, value_step.old, value_step.returns
        bounded = np.clip(new, old - clip_range, old + clip_range)
        values.append(float(((bounded - returns) ** 2 > (new - returns) ** 2).mean()))
    numbers = {
        "actor/pg_clipfrac": mean(clipped),
        "actor/pg_clipfrac_lower": mean(dual),
        "actor/ppo_kl": mean(kl),
        "critic/vf_clipfrac": mean(values),
    }
    return one_row(item, {**numbers, **_probabilities(item)})


def _probabilities(item: IterationRows) -> dict[str, float]:
    before = responses(item)
    trainer, sampler = exp(before.old), exp(before.rollout)
    difference = np.abs(trainer - sampler)
    varies = trainer.std() > 0 and sampler.std() > 0
    return {
        "training/rollout_probs_diff_max": float(difference.max()),
        "training/rollout_probs_diff_mean": float(difference.mean()),
        "training/rollout_probs_diff_std": float(difference.std(ddof=1)) if len(difference) > 1 else float("nan"),
        "training/rollout_actor_probs_pearson_corr": (
            float(np.corrcoef(trainer, sampler)[0, 1]) if varies else float("nan")
        ),
    }
