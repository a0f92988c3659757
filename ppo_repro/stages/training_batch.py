"""Stage `TrainingBatch`: the data on which an iteration trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import assert_never

import torch
from torch import Tensor

from ppo_repro.buffers import Advantages, Coefficients, ForwardPass, ReturnStatistics, Rollout
from ppo_repro.config.algorithm import (
    AdaptiveClipObjective,
    CispoObjective,
    ClipObjective,
    FunctionEstimator,
    FunctionObjective,
    KLConfig,
    KLInLoss,
    NoValue,
    PenaltyObjective,
    PolicyGradientObjective,
    PPOConfig,
    SequenceClipObjective,
    UnclippedObjective,
    ValueConfig,
    ValueHead,
)
from ppo_repro.config.run import RunConfig
from ppo_repro.ppo import kl
from ppo_repro.ppo.corrections import Corrections, removes_loss
from ppo_repro.ppo.objectives import Cispo, Clip, Objective, Penalty, PolicyGradient, SequenceClip
from ppo_repro.ppo.own_batches import ObjectiveBatch
from ppo_repro.stages.corrections import corrections_of
from ppo_repro.user.functions import BUILT_IN, Functions, OwnObjective

TokenKL = Callable[[Tensor, Tensor], Tensor]  # log-probs of policy and reference [n] -> differentiable KL [n], nats


def objective_of(ppo: PPOConfig, coefficients: Coefficients, functions: Functions) -> Objective | OwnObjective:
    """Return the configured objective; adaptive ones use this iteration's clip range or penalty."""
    match ppo.objective:
        case ClipObjective() as o:
            return Clip(o.clip_range, o.high, o.dual_clip)
        case AdaptiveClipObjective():
            return Clip(coefficients.clip_range, coefficients.clip_range)
        case SequenceClipObjective() as o:
            return SequenceClip(o.clip_range, o.high)
        case CispoObjective() as o:
            return Cispo(o.floor, o.cap)
        case PenaltyObjective():
            return Penalty(coefficients.penalty_coef)
        case PolicyGradientObjective():
            return PolicyGradient()
        case UnclippedObjective():
            return Objective()
        case FunctionObjective():
            assert functions.objective is not None
            return functions.objective
        case unknown:
            assert_never(unknown)


def kl_estimator_of(charged: KLConfig, functions: Functions) -> TokenKL | None:
    """Return the estimator of the KL in the loss; None if there is none, or if it is over the whole vocabulary."""
    if not isinstance(charged, KLInLoss) or charged.loss_has_exact_kl:
        return None
    if isinstance(charged.estimator, FunctionEstimator):
        assert functions.estimator is not None
        return functions.estimator.estimate
    return partial(kl.loss, charged.estimator)


@dataclass(frozen=True)
class ValueTargets:
    """What an iteration trains the value model towards, N tokens, in reward units."""

    old_values: Tensor  # [N]
    returns: Tensor  # [N]
    statistics: ReturnStatistics  # the network predicts in their units, and the loss is in the square of these
    clip_range: float | None  # None: the loss is not clipped
    coef: float  # weight of a head's loss beside the policy's; 1 for a model of its own


@dataclass(frozen=True)
class TrainingBatch:
    """The N response tokens of an iteration with all inputs of a loss except the networks' outputs."""

    rollout: Rollout  # as the trainer received it
    about_tokens: Mapping[str, Tensor]  # fields of `own_batches.Tokens`, [N] each
    objective: Objective | OwnObjective
    entropy_coef: float
    kl_coef: float
    anchor_logprobs: Tensor  # [N] log of the ratio's denominator
    old_logprobs: Tensor  # [N]
    ref_logprobs: Tensor  # [N]
    advantages: Tensor  # [N] as the objective takes them
    corrections: Corrections | None  # None unless importance weights or rejection are configured
    in_losses: Tensor | None  # [N] bool, the tokens that are in the losses at all; None: all are
    kl_estimator: TokenKL | None  # None unless the loss has a KL that sampled tokens estimate
    value_targets: ValueTargets | None  # None without a value model


def training_batch(
    config: RunConfig,
    coefficients: Coefficients,
    rollout: Rollout,
    forward: ForwardPass,
    advantages: Advantages,
    functions: Functions = BUILT_IN,
) -> TrainingBatch:
    """Collect the inputs of an iteration's losses, and leave rejected tokens out of them if so configured."""
    ppo, in_losses = config.ppo, rollout.in_losses
    corrected = corrections_of(
        ppo.importance_weights, ppo.rejection, forward.old_logprobs, rollout.rollout_logprobs, rollout.lengths
    )
    if corrected is not None and ppo.rejected_tokens == "left_out":
        accepted = ~removes_loss(corrected.changes)
        in_losses = accepted if in_losses is None else accepted & in_losses
    return TrainingBatch(
        rollout=rollout,
        about_tokens=rollout.about_tokens(),
        objective=objective_of(ppo, coefficients, functions),
        entropy_coef=ppo.entropy_coef,
        kl_coef=coefficients.kl_coef,
        anchor_logprobs=rollout.rollout_logprobs if ppo.ratio_anchor == "rollout" else forward.old_logprobs,
        old_logprobs=forward.old_logprobs,
        ref_logprobs=forward.ref_logprobs,
        advantages=advantages.advantages,
        corrections=corrected,
        in_losses=in_losses,
        kl_estimator=kl_estimator_of(config.kl, functions),
        value_targets=value_targets(config.value, coefficients.returns, forward, advantages),
    )


def value_targets(
    settings: ValueConfig, statistics: ReturnStatistics, forward: ForwardPass, advantages: Advantages
) -> ValueTargets | None:
    """Collect what an iteration trains the value model towards; None without a value model."""
    if isinstance(settings, NoValue) or forward.values is None or advantages.returns is None:
        return None
    return ValueTargets(
        old_values=forward.values,
        returns=advantages.returns,
        statistics=statistics,
        clip_range=None if settings.clip_range is None else settings.clip_range * statistics.scale,
        coef=settings.value_coef if isinstance(settings, ValueHead) else 1.0,
    )


def objective_batch(batch: TrainingBatch, tokens: Tensor, new_logprobs: Tensor, entropies: Tensor) -> ObjectiveBatch:
    """Collect the arguments of an objective for n tokens of whole responses, [n] each.

    Args:
        tokens: [n] int64, index into the iteration's tokens.
        new_logprobs: [n] float32, of the present policy, nats.
        entropies: [n] float32, of the present policy, nats.
    """
    rollout, corrected, anchor = batch.rollout, batch.corrections, batch.anchor_logprobs[tokens]
    about = {name: values[tokens] for name, values in batch.about_tokens.items()}
    return ObjectiveBatch(
        **about,
        new_logprobs=new_logprobs,
        entropies=entropies,
        ratios=batch.objective.ratios(new_logprobs, anchor, about["responses"]),
        anchor_logprobs=anchor,
        old_logprobs=batch.old_logprobs[tokens],
        rollout_logprobs=rollout.rollout_logprobs[tokens],
        ref_logprobs=batch.ref_logprobs[tokens],
        advantages=batch.advantages[tokens],
        corrections=torch.ones(len(tokens)) if corrected is None else corrected.weights[tokens],
    )
