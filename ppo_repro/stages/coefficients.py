"""Stage `Coefficients`: values besides the weights that change between iterations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ppo_repro.buffers import Advantages, Coefficients, ForwardPass, MinibatchUpdate, ReturnStatistics
from ppo_repro.config.algorithm import (
    CLIP_RANGE_MAX,
    CLIP_RANGE_MIN,
    AdaptiveClipObjective,
    AdaptiveController,
    KLConfig,
    KLInReward,
    NoKL,
    Objective,
    PenaltyObjective,
    PPOConfig,
    PredictedValue,
    SeparateValue,
    ValueConfig,
)
from ppo_repro.config.run import RunConfig
from ppo_repro.models.state import TrainState
from ppo_repro.ppo.controllers import adaptive_clip_range, adaptive_kl_coef, adaptive_penalty_coef, rate_factor


def first_coefficients(charged: KLConfig, objective: Objective) -> Coefficients:
    """Return the coefficients of the first iteration, as configured; 0 for a coefficient that the run does not use."""
    return Coefficients(
        kl_coef=0.0 if isinstance(charged, NoKL) else charged.kl_coef,
        clip_range=objective.clip_range if isinstance(objective, AdaptiveClipObjective) else 0.0,
        penalty_coef=objective.penalty_coef if isinstance(objective, PenaltyObjective) else 0.0,
        returns=ReturnStatistics(),
    )


def next_coefficients(
    config: RunConfig,
    coefficients: Coefficients,
    forward: ForwardPass,
    advantages: Advantages,
    updates: Sequence[MinibatchUpdate],
    sequences: int,
) -> Coefficients:
    """Compute the coefficients of the next iteration from the KL and the returns of this iteration.

    Args:
        forward: gives the KL to the reference, for the adaptive KL controller.
        advantages: gives the returns, for their running statistics.
        updates: give the KL of the last epoch, for an adaptive clip range or penalty.
    """
    controller = config.kl.controller if isinstance(config.kl, KLInReward) else None
    if isinstance(controller, AdaptiveController):
        per_sequence = math.fsum(forward.ref_kl.tolist()) / sequences
        coef = adaptive_kl_coef(coefficients.kl_coef, per_sequence, controller.target_kl, sequences, controller.horizon)
        coefficients = replace(coefficients, kl_coef=coef)
    objective = config.ppo.objective
    if isinstance(objective, AdaptiveClipObjective):
        kl = last_kl(updates)
        clip_range = adaptive_clip_range(
            coefficients.clip_range, kl, objective.target_kl, CLIP_RANGE_MIN, CLIP_RANGE_MAX
        )
        coefficients = replace(coefficients, clip_range=clip_range)
    if isinstance(objective, PenaltyObjective) and objective.target_kl is not None:
        kl, first = last_kl(updates), objective.penalty_coef
        coef = adaptive_penalty_coef(coefficients.penalty_coef, kl, objective.target_kl, first)
        coefficients = replace(coefficients, penalty_coef=coef)
    is_normalised = isinstance(config.value, PredictedValue) and config.value.normalize_returns
    if is_normalised and advantages.returns is not None:
        coefficients = replace(coefficients, returns=coefficients.returns.joined(advantages.returns.tolist()))
    return coefficients


def learning_rates(ppo: PPOConfig, value: ValueConfig, iteration: int) -> tuple[float, float | None]:
    """Return the learning rates of policy and value model in an iteration; None without a separate value model."""
    factor = rate_factor(ppo.schedule, iteration, ppo.iterations, ppo.warmup_iterations)
    of_value = value.learning_rate * factor if isinstance(value, SeparateValue) else None
    return ppo.learning_rate * factor, of_value


def set_learning_rates(state: TrainState, ppo: PPOConfig, value: ValueConfig) -> None:
    """Give the optimizers the learning rates that the schedule has in the iteration of `state`."""
    of_policy, of_value = learning_rates(ppo, value, state.iteration)
    state.policy_optimizer.settings = replace(state.policy_optimizer.settings, learning_rate=of_policy)
    if state.value_optimizer is not None and of_value is not None:
        state.value_optimizer.settings = replace(state.value_optimizer.settings, learning_rate=of_value)


def last_kl(updates: Sequence[MinibatchUpdate]) -> float:
    """Return KL(anchor || new) in nats: the mean of k3 over the policy's last epoch, before each of its steps."""
    steps = [(u.epoch, len(u.tokens), u.policy.approx_kl) for u in updates if u.policy is not None]
    last_epoch = [(tokens, approx_kl) for epoch, tokens, approx_kl in steps if epoch == steps[-1][0]]
    return math.fsum(tokens * approx_kl for tokens, approx_kl in last_epoch) / sum(tokens for tokens, _ in last_epoch)
