"""The per-token losses of a micro-batch: the configured objective applied to the networks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ppo_repro.buffers import Advantages, Coefficients, ForwardPass, ReturnStatistics, Rollout
from ppo_repro.config.algorithm import KLInLoss, NoValue, ValueHead
from ppo_repro.config.objectives import (
    AdaptiveClipObjective,
    CispoObjective,
    ClipCovObjective,
    ClipObjective,
    KLCovObjective,
    PenaltyObjective,
    PolicyGradientObjective,
    SequenceClipObjective,
)
from ppo_repro.config.run import RunConfig
from ppo_repro.models.batches import MicroBatch
from ppo_repro.models.networks import ValueModel, hidden_states, values_of
from ppo_repro.models.state import TrainState
from ppo_repro.numerics.families import trunk_of
from ppo_repro.numerics.network import logits
from ppo_repro.numerics.rows import Rows
from ppo_repro.numerics.token_statistics import kl_divergence, token_statistics
from ppo_repro.ppo import kl, losses
from ppo_repro.ppo.sequences import response_means, sequence_ratios
from ppo_repro.remedies.corrections import Corrections, corrections_of
from ppo_repro.stages.faults import Stream, dropped, training_eligible, training_temperature
from ppo_repro.stages.forward import in_reward_units
from ppo_repro.stages.pieces import in_pieces

Columns = tuple[Tensor, ...]  # per-token tensors to record, [m] each, or empty where there is no such thing
LossAndColumns = tuple[Tensor, Columns]  # per-token loss [m]
_NOTHING = torch.empty(0)


class PolicyColumns(NamedTuple):
    """The columns of `PolicyLoss`, in their order."""

    losses: Tensor
    new_logprobs: Tensor
    ratios: Tensor
    new_entropies: Tensor
    surrogates: Tensor
    penalty_terms: Tensor
    kl_terms: Tensor


def band_of(config: RunConfig, clip_range: float) -> losses.Band | None:
    """The band of the configured objective, None if it has no clip; `clip_range` is that of an adaptive clip."""
    objective = config.ppo.objective
    if isinstance(objective, ClipObjective):
        return losses.Band(objective.clip_range, objective.high, objective.dual_clip)
    if isinstance(objective, SequenceClipObjective | ClipCovObjective):
        return losses.Band(objective.clip_range, objective.high)
    return losses.Band(clip_range, clip_range) if isinstance(objective, AdaptiveClipObjective) else None


@dataclass(frozen=True)
class PolicyTerms:
    """Surrogate plus penalty, minus entropy bonus, plus KL term, per token, of what the policy says.

    `tokens` are those of whole responses, in the order of the rollout.
    """

    anchor: Tensor  # [N] log of the ratio's denominator
    ref_logprobs: Tensor  # [N]
    advantages: Tensor  # [N]
    responses: Tensor  # [N] int64, the response of each token
    corrections: Corrections | None
    band: losses.Band | None
    coefficients: Coefficients
    config: RunConfig
    chosen: Tensor | None = None  # [N] bool, the tokens of the minibatch that Clip-Cov or KL-Cov changes

    def of(self, tokens: Tensor, logprobs: Tensor, entropies: Tensor, kl_terms: Tensor | None) -> PolicyColumns:
        """The columns of `tokens` [m]; `kl_terms` [m] where the loss has them."""
        ratios = self._ratios(logprobs, tokens)
        surrogates, penalties = self._surrogates(logprobs, ratios, tokens), self._penalties(logprobs, tokens)
        loss = surrogates if penalties is None else surrogates + penalties
        if self.corrections is not None:
            loss = loss * self.corrections.weights[tokens]
        loss = loss - entropies * self.config.ppo.entropy_coef
        if kl_terms is not None:
            loss = loss + kl_terms
        parts = (_NOTHING if part is None else part for part in (penalties, kl_terms))
        return PolicyColumns(loss, logprobs, ratios, entropies, surrogates, *parts)

    def estimated_kl_terms(self, tokens: Tensor, logprobs: Tensor) -> Tensor | None:
        """kl_coef times the estimate of KL(policy || reference), [m]; None unless the loss has one."""
        kl_loss = self.config.kl
        if not isinstance(kl_loss, KLInLoss) or kl_loss.estimator == "exact":
            return None
        return kl.loss(kl_loss.estimator, logprobs, self.ref_logprobs[tokens]) * self.coefficients.kl_coef

    def _ratios(self, logprobs: Tensor, tokens: Tensor) -> Tensor:
        if isinstance(self.config.ppo.objective, SequenceClipObjective):
            lengths = torch.unique_consecutive(self.responses[tokens], return_counts=True)[1]
            return sequence_ratios(logprobs, self.anchor[tokens], lengths)
        return losses.probability_ratios(logprobs, self.anchor[tokens])

    def _surrogates(self, logprobs: Tensor, ratios: Tensor, tokens: Tensor) -> Tensor:
        advantages, objective = self.advantages[tokens], self.config.ppo.objective
        if self.band is not None:
            surrogates = losses.clipped_surrogate(ratios, advantages, self.band)
            if self.chosen is None:
                return surrogates
            return torch.where(self.chosen[tokens], torch.zeros_like(surrogates), surrogates)
        if isinstance(objective, CispoObjective):
            return losses.cispo_loss(logprobs, ratios, advantages, objective.floor, objective.cap)
        if isinstance(objective, PolicyGradientObjective):
            return losses.policy_gradient(logprobs, advantages)
        return losses.unclipped_surrogate(ratios, advantages)

    def _penalties(self, logprobs: Tensor, tokens: Tensor) -> Tensor | None:
        objective, log_ratios = self.config.ppo.objective, logprobs - self.anchor[tokens]
        if isinstance(objective, KLCovObjective) and self.chosen is not None:
            return losses.covariance_penalty(log_ratios, self.chosen[tokens], objective.penalty_coef)
        if not isinstance(objective, PenaltyObjective):
            return None
        return losses.anchor_penalty(log_ratios, self.coefficients.penalty_coef)

    def flags(self, ratios: Tensor, tokens: Tensor) -> Tensor:
        """The ClipFlag of each token, [M] uint8; all NONE without a clip."""
        objective, flags = self.config.ppo.objective, torch.full(ratios.shape, losses.ClipFlag.NONE, dtype=torch.uint8)
        if isinstance(objective, CispoObjective):
            flags = losses.weight_flags(ratios, objective.floor, objective.cap)
        if self.band is not None:
            flags = losses.clip_flags(ratios, self.advantages[tokens], self.band)
        if self.chosen is not None:
            changed = losses.ClipFlag.CLIP_COV if isinstance(objective, ClipCovObjective) else losses.ClipFlag.KL_COV
            flags[self.chosen[tokens]] = changed
        return flags


@dataclass(frozen=True)
class PolicyLoss:
    """The policy's terms from its forward pass."""

    state: TrainState
    rollout: Rollout
    terms: PolicyTerms
    step: Stream = ()  # of the minibatch, for what dropout draws

    def of(self, m: MicroBatch) -> LossAndColumns:
        """(loss, `PolicyColumns`) from a forward pass of the policy."""
        return self.of_hidden(m, self.hidden(m))

    def hidden(self, m: MicroBatch) -> Tensor:
        """The trunk's hidden states [m, H]."""
        return hidden_states(trunk_of(self.state.policy), m.batch, replay=True)

    def of_hidden(self, m: MicroBatch, hidden: Tensor) -> LossAndColumns:
        """The same from the trunk's hidden states [m, H]; the losses of tokens are computed on the CPU."""
        config, ref_seen = self.terms.config, None
        seen = dropped(config, hidden, m.tokens, self.step)
        if isinstance(config.kl, KLInLoss) and config.kl.estimator == "exact":
            with torch.no_grad():
                ref_seen = hidden_states(trunk_of(self.state.reference), m.batch)
        vocab_size = self.state.policy.config.vocab_size

        def of_rows(hidden: Tensor, rows: slice, where: Rows) -> tuple[Tensor, ...]:
            return self._of_rows(m, hidden, ref_seen, rows, where)

        logprobs, entropies, *divergences = in_pieces(of_rows, seen, m.batch.rows, vocab_size)
        estimated = self.terms.estimated_kl_terms(m.tokens, logprobs)
        kl_terms = divergences[0] * self.terms.coefficients.kl_coef if divergences else estimated
        columns = self.terms.of(m.tokens, logprobs, entropies, kl_terms)
        return columns.losses, columns

    def _of_rows(
        self, m: MicroBatch, hidden: Tensor, ref_seen: Tensor | None, rows: slice, where: Rows
    ) -> tuple[Tensor, ...]:
        """Log-probs and entropies of some tokens, and KL(policy || reference) where there is a reference, [r] each."""
        temperature, mode = training_temperature(self.terms.config), self.terms.config.numerics.mode
        own = logits(self.state.policy, hidden, where).cpu()
        eligible = training_eligible(self.terms.config, self.rollout.kept_tokens[m.tokens[rows]], own.shape[-1])
        statistics = token_statistics(own, m.batch.targets[rows], temperature, eligible, mode)
        if ref_seen is None:
            return statistics
        with torch.no_grad():
            other = logits(self.state.reference, ref_seen[rows]).cpu()
        return *statistics, kl_divergence(own, other, temperature, eligible, mode)


@dataclass(frozen=True)
class ValueTerms:
    """Squared error of the value model's values, plain or clipped, per token.

    Values and returns are in reward units. Where returns are normalised by a scale s, the loss is the squared
    error in units of s, and the configured clip range is in units of s.
    """

    old_values: Tensor  # [N]
    returns: Tensor  # [N]
    clip_range: float | None  # in reward units
    statistics: ReturnStatistics

    def of(self, tokens: Tensor, values: Tensor) -> Tensor:
        """The losses [m] of `values` [m] on `tokens` [m]."""
        returns = self.returns[tokens]
        if self.clip_range is None:
            loss = losses.value_loss(values, returns)
        else:
            loss = losses.clipped_value_loss(values, self.old_values[tokens], returns, self.clip_range)
        if self.statistics.count:
            loss = loss * (1.0 / (self.statistics.scale * self.statistics.scale))
        return loss

    def clips(self, new_values: Tensor, tokens: Tensor) -> Tensor:
        """Where the clipped branch decides the loss. Bool [M]."""
        if self.clip_range is None:
            return torch.zeros(new_values.shape, dtype=torch.bool)
        return losses.value_clip_binds(new_values, self.old_values[tokens], self.returns[tokens], self.clip_range)


@dataclass(frozen=True)
class ValueLoss:
    """The value model's terms from its forward pass."""

    value_model: ValueModel
    terms: ValueTerms

    def of(self, m: MicroBatch) -> LossAndColumns:
        """(loss, (loss, new values)) from a forward pass of the value model."""
        return self.of_hidden(m, hidden_states(self.value_model.trunk, m.batch))

    def of_hidden(self, m: MicroBatch, hidden: Tensor) -> LossAndColumns:
        """The same from the trunk's hidden states [m, H]."""
        values = in_reward_units(values_of(self.value_model, hidden, m.batch).cpu(), self.terms.statistics)
        loss = self.terms.of(m.tokens, values)
        return loss, (loss, values)


@dataclass(frozen=True)
class Objective:
    """The losses of one iteration."""

    policy: PolicyLoss
    value: ValueLoss | None  # None without a value model
    value_coef: float  # of a value head on the policy's trunk

    def of_step(self, epoch: int, minibatch: int) -> Objective:
        """The same losses in another minibatch."""
        step = ("update", self.policy.state.iteration, epoch, minibatch)
        return replace(self, policy=replace(self.policy, step=step))

    def joint(self, m: MicroBatch) -> LossAndColumns:
        """Policy loss plus value_coef times value loss, both from one pass of the shared trunk."""
        assert self.value is not None
        hidden = self.policy.hidden(m)
        policy_loss, policy_columns = self.policy.of_hidden(m, hidden)
        value_loss, value_columns = self.value.of_hidden(m, hidden)
        return policy_loss + value_loss * self.value_coef, (*policy_columns, *value_columns)


@dataclass(frozen=True)
class Terms:
    """The losses of one iteration as functions of what the networks say; nothing here computes a network."""

    policy: PolicyTerms
    value: ValueTerms | None  # None without a value model


def make_terms(
    config: RunConfig, coefficients: Coefficients, rollout: Rollout, forward: ForwardPass, advantages: Advantages
) -> Terms:
    """The losses of an iteration under the coefficients in force."""
    ppo, value = config.ppo, config.value
    by_response = isinstance(ppo.objective, SequenceClipObjective) and ppo.objective.advantages == "response"
    policy = PolicyTerms(
        rollout.rollout_logprobs if ppo.ratio_anchor == "rollout" else forward.old_logprobs,
        forward.ref_logprobs,
        response_means(advantages.advantages, rollout.lengths) if by_response else advantages.advantages,
        rollout.sequence_of_token(),
        corrections_of(config, rollout, forward),
        band_of(config, coefficients.clip_range),
        coefficients,
        config,
    )
    if isinstance(value, NoValue):
        return Terms(policy, None)
    assert forward.values is not None and advantages.returns is not None
    statistics = coefficients.returns
    clip_range = None if value.clip_range is None else value.clip_range * statistics.scale
    return Terms(policy, ValueTerms(forward.values, advantages.returns, clip_range, statistics))


def make_objective(
    state: TrainState, rollout: Rollout, forward: ForwardPass, advantages: Advantages, config: RunConfig
) -> Objective:
    """The losses that the update of one iteration minimises."""
    terms = make_terms(config, state.coefficients, rollout, forward, advantages)
    policy = PolicyLoss(state, rollout, terms.policy)
    if terms.value is None:
        return Objective(policy, None, 0.0)
    assert state.value_model is not None
    value_coef = config.value.value_coef if isinstance(config.value, ValueHead) else 0.0
    return Objective(policy, ValueLoss(state.value_model, terms.value), value_coef)
