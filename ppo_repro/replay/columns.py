"""Which recorded columns each stage computes, and which it needs that not every level of records has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ppo_repro.config.algorithm import KLInLoss, KLInReward
from ppo_repro.config.run import RunConfig

Stage = Literal["rewards", "advantages", "losses", "coefficients", "summary"]
STAGES: tuple[Stage, ...] = ("rewards", "advantages", "losses", "coefficients", "summary")

# what a stage computes, by table; a column that a level leaves out is not compared
COMPUTED: Mapping[Stage, Mapping[str, tuple[str, ...]]] = {
    "rewards": {
        "sequences": ("scores", "kl_penalty_sum", "reward_sum"),
        "tokens": ("kl_penalties", "placed_scores", "raw_rewards", "rewards"),
    },
    "advantages": {"tokens": ("raw_advantages", "advantages", "returns")},
    "losses": {
        "updates": (
            *("epoch", "minibatch", "sequence", "position", "ratios", "clip_flag", "value_clipped"),
            *("loss_weights", "importance_weights", "correction", "policy_losses", "surrogates", "penalty_terms"),
            *("kl_terms", "value_losses"),
        ),
        "steps": (
            *("tokens", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "value_clip_fraction"),
            *("surrogate_loss", "penalty_loss", "entropy_loss", "kl_loss"),
        ),
    },
    "coefficients": {
        "steps": ("learning_rate", "value_learning_rate"),
        "iterations": ("kl_coef", "clip_range", "penalty_coef", "return_mean", "return_scale", "policy_steps"),
    },
    "summary": {
        "iterations": (
            *("sequences", "tokens", "score_mean", "accuracy", "reward_mean", "response_length_mean"),
            *("truncated_fraction", "entropy", "ref_kl_per_token", "ref_kl_per_sequence", "explained_variance"),
            *("unequal_old_rollout_logprobs", "max_abs_old_rollout", "first_minibatch_tokens"),
            *("unequal_first_ratios", "unequal_values", "eval_accuracy", "eval_score"),
        )
    },
}


@dataclass(frozen=True)
class Need:
    """A column that a stage cannot do without."""

    stage: Stage
    table: str
    column: str


def needs(config: RunConfig) -> tuple[Need, ...]:
    """What the stages of a configuration need beyond level `lean`."""
    found = []
    kl = config.kl
    if isinstance(kl, KLInReward) and kl.estimator == "exact" and kl.direction == "reference_policy":
        found.append(Need("rewards", "tokens", "reverse_ref_kl"))
    if isinstance(kl, KLInLoss) and kl.estimator == "exact":
        found.append(Need("losses", "updates", "kl_terms"))
    return tuple(found)


def taken_as_recorded(config: RunConfig) -> frozenset[tuple[str, str]]:
    """Columns that a stage would compute from distributions, which no record holds: inputs instead of results."""
    exact = isinstance(config.kl, KLInLoss) and config.kl.estimator == "exact"
    return frozenset({("updates", "kl_terms")} if exact else ())
