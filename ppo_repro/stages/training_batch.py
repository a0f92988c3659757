"""Stage `TrainingBatch`: the data on which an iteration trains, and its division into minibatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from ppo_repro.base.processes import SLOTS
from ppo_repro.base.ranks import Ranks
from ppo_repro.base.seeding import permutation
from ppo_repro.buffers import Advantages, Coefficients, ForwardPass, PolicyUpdate, ReturnStatistics, Rollout
from ppo_repro.config.algorithm import (
    AdaptiveClipObjective,
    CispoObjective,
    ClipObjective,
    DivergenceRejection,
    FunctionEstimator,
    FunctionObjective,
    ImportanceWeights,
    KLConfig,
    KLInLoss,
    NoValue,
    PenaltyObjective,
    PolicyGradientObjective,
    PPOConfig,
    RatioRejection,
    Rejection,
    SeparateValue,
    SequenceClipObjective,
    UnclippedObjective,
    ValueConfig,
    ValueHead,
    VetoRejection,
)
from ppo_repro.config.layout import LayoutConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.models.batches import MicroBatch, micro_batches
from ppo_repro.numerics.sequences import slots_of_rank
from ppo_repro.ppo import corrections, kl
from ppo_repro.ppo.corrections import Correction, Corrections
from ppo_repro.ppo.losses import loss_weights
from ppo_repro.ppo.objectives import Cispo, Clip, Objective, Penalty, PolicyGradient, SequenceClip
from ppo_repro.ppo.own_batches import ObjectiveBatch
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
        accepted = ~corrections.removes_loss(corrected.changes)
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


def corrections_of(
    settings: ImportanceWeights | None, rejection: Sequence[Rejection], old: Tensor, sampled: Tensor, lengths: Tensor
) -> Corrections | None:
    """Return importance weights, which are 0 for rejected tokens; None if neither is configured.

    The mean of normalised weights is over all tokens of the iteration, including rejected tokens.

    Args:
        settings: the section `ppo.importance_weights`; None leaves every weight 1 before the rejection.
        rejection: the entries of `ppo.rejection`.
        old: [N] float32, log-probs of the trainer before the update, nats.
        sampled: [N] float32, log-probs of the sampler, nats.
        lengths: [B] int64, tokens of each response; their sum is N.
    """
    if settings is None and not rejection:
        return None
    weights, changes = torch.ones_like(old), torch.full(old.shape, Correction.NONE, dtype=torch.uint8)
    if settings is not None:
        ratios = corrections.importance_ratios(old, sampled, lengths, settings.level)
        bound = corrections.masked_weights if settings.kind == "masked" else corrections.truncated_weights
        weights, changes = bound(ratios, settings.lowest, settings.cap)
        if settings.normalize:
            weights = corrections.normalized_weights(weights, lengths, by_response=settings.level != "token")
    for entry in rejection:
        rejected = _rejected(entry, old, sampled, lengths)
        weights = torch.where(rejected, 0.0, weights)
        changes = torch.where(rejected, torch.tensor(int(Correction.REJECTED), dtype=torch.uint8), changes)
    return Corrections(weights, changes)


def _rejected(entry: Rejection, old: Tensor, sampled: Tensor, lengths: Tensor) -> Tensor:
    """Return which tokens an entry of the configuration rejects, [N] bool."""
    if isinstance(entry, DivergenceRejection):
        return corrections.beyond_divergence(old, sampled, lengths, entry.estimator, entry.level, entry.above)
    if isinstance(entry, RatioRejection):
        ratios = corrections.importance_ratios(old, sampled, lengths, entry.level)
        return corrections.outside_ratio(ratios, entry.low, entry.high)
    if not isinstance(entry, VetoRejection):
        assert_never(entry)
    return corrections.vetoed(corrections.importance_ratios(old, sampled, lengths, "token"), lengths, entry.below)


def minibatches(sequences: int, size: int, seed: int, iteration: int, epoch: int) -> list[Tensor]:
    """Cut a random permutation of 0..sequences-1 into minibatches, int64 [size] each, and sort each.

    Every iteration and epoch has its own permutation. The last minibatch may have fewer responses.
    """
    order = torch.from_numpy(permutation(sequences, "minibatches", seed, iteration, epoch))
    return [chunk.sort().values for chunk in order.split(size)]


class PlannedStep(NamedTuple):
    """One minibatch of one epoch, and which models take a step on it."""

    epoch: int
    minibatch: int
    sequences: Tensor  # [S] int64, the responses of the minibatch, ascending
    of_policy: bool  # with any value head on the policy's trunk
    of_value: bool  # a value model with a trunk of its own


@dataclass
class Schedule:
    """The steps of one iteration: policy and value model each have a number of epochs, over the same minibatches.

    After a minibatch with more KL than `early_stop_kl`, the policy takes no further step.
    """

    config: RunConfig
    iteration: int
    stopped: bool = False

    def planned_steps(self, sequences: int) -> Iterator[PlannedStep]:
        """Yield the steps on so many responses in order, until no model takes a step."""
        ppo, value, seed = self.config.ppo, self.config.value, self.config.seed
        value_epochs = value.epochs or ppo.epochs if isinstance(value, SeparateValue) else 0
        for epoch in range(max(ppo.epochs, value_epochs)):
            for number, chosen in enumerate(minibatches(sequences, ppo.minibatch_size, seed, self.iteration, epoch)):
                of_policy, of_value = epoch < ppo.epochs and not self.stopped, epoch < value_epochs
                if not (of_policy or of_value):
                    return
                yield PlannedStep(epoch, number, chosen, of_policy, of_value)

    def follow(self, update: PolicyUpdate) -> None:
        """Stop the policy's steps if its KL in this step exceeded `early_stop_kl`."""
        limit = self.config.ppo.early_stop_kl
        self.stopped = limit is not None and update.approx_kl > limit


@dataclass(frozen=True)
class Minibatch:
    """The M tokens of one optimizer step."""

    tokens: Tensor  # [M] int64 index into the [N] fields
    loss_weights_of_all: Tensor  # [N] float32, weight of each token's loss in the step; 0 outside the minibatch
    micro_batches: tuple[MicroBatch, ...]  # of this rank's sequences

    @property
    def loss_weights(self) -> Tensor:
        """Return the weights of the minibatch's tokens, [M] float32."""
        return self.loss_weights_of_all[self.tokens]


def minibatch_of(
    aggregation: str,
    batch: TrainingBatch,
    sequences: Tensor,
    micro_batches: Sequence[MicroBatch] = (),
) -> Minibatch:
    """Make the minibatch of one step: its tokens, and the weight of each in the loss.

    Args:
        sequences: [S] int64, the responses of the minibatch, ascending.
        micro_batches: of this rank's responses; empty if no model computes the step.
    """
    rollout = batch.rollout
    tokens = rollout.tokens_of(sequences)
    in_losses = None if batch.in_losses is None else batch.in_losses[tokens]
    weights = torch.zeros(len(rollout.response_ids))
    weights[tokens] = loss_weights(aggregation, rollout.lengths[sequences], in_losses)
    return Minibatch(tokens, weights, tuple(micro_batches))


def micro_batches_of_rank(
    layout: LayoutConfig, replay_routes: bool, rollout: Rollout, sequences: Tensor, ranks: Ranks
) -> list[MicroBatch]:
    """Lay out this rank's responses of a minibatch for passes with gradients.

    Args:
        replay_routes: whether the sampler's routes replace the routers' choice.
        sequences: [S] int64, the responses of the minibatch, ascending.
    """
    mine = sequences[torch.tensor(ranks.mine(len(sequences)), dtype=torch.int64)]
    slots = slots_of_rank(len(sequences), SLOTS, ranks)
    return micro_batches(rollout, mine, layout.update_micro_batch, layout.padding, replay_routes, slots)
