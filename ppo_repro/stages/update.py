"""Stage `MinibatchUpdate`: epochs of minibatches over one rollout, one optimizer step each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppo_repro.buffers import Advantages, ForwardPass, MinibatchUpdate, PolicyUpdate, Rollout, ValueUpdate
from ppo_repro.clock import Clock
from ppo_repro.config.algorithm import SeparateValue
from ppo_repro.config.run import RunConfig
from ppo_repro.models.batches import MicroBatch, micro_batches
from ppo_repro.models.state import TrainState
from ppo_repro.numerics.optimizer import SLOTS, Optimizer, StepReport, weights_digest
from ppo_repro.numerics.rows import slots_of_rank
from ppo_repro.numerics.sums import mean_of
from ppo_repro.ppo import kl, losses
from ppo_repro.ppo.schedules import rate_factor
from ppo_repro.ranks import Ranks
from ppo_repro.remedies.covariance import chooses_tokens, chosen_tokens
from ppo_repro.seeding import permutation
from ppo_repro.stages.faults import training_weights
from ppo_repro.stages.objective import (
    Columns,
    LossAndColumns,
    Objective,
    PolicyColumns,
    PolicyTerms,
    ValueTerms,
    make_objective,
)

_POLICY_COLUMNS = len(PolicyColumns._fields)


def minibatches(sequences: int, size: int, seed: int, iteration: int, epoch: int) -> list[Tensor]:
    """A shuffle of 0..sequences-1 cut into minibatches, each sorted. Every epoch has its own shuffle."""
    order = torch.from_numpy(permutation(sequences, "minibatches", seed, iteration, epoch))
    return [chunk.sort().values for chunk in order.split(size)]


@dataclass(frozen=True)
class _Work:
    """One minibatch: this rank's share as micro-batches, and facts about the whole minibatch."""

    mine: list[MicroBatch]
    tokens: Tensor  # [M] int64, of all ranks
    weights: Tensor  # [N] float32, weight of each token's loss; 0 outside the minibatch
    ranks: Ranks

    def own_weights(self) -> Tensor:
        """[M] float32, the weights of the minibatch's tokens."""
        return self.weights[self.tokens]

    by_tensor: bool  # whether the gradient of each tensor is measured
    place: tuple[int, int, int]  # iteration, epoch, minibatch


def _share_out(
    rollout: Rollout,
    sequences: Tensor,
    counted: Tensor | None,
    config: RunConfig,
    ranks: Ranks,
    place: tuple[int, int, int],
) -> _Work:
    layout = config.layout
    mine = sequences[torch.tensor(ranks.mine(len(sequences)), dtype=torch.int64)]
    slots = slots_of_rank(len(sequences), SLOTS, ranks)
    work = micro_batches(rollout, mine, layout.update_micro_batch, layout.padding, config.ppo.replay_routes, slots)
    tokens = rollout.tokens_of(sequences)
    weights = torch.zeros(len(rollout.response_ids))
    in_losses = None if counted is None else counted[tokens]
    reasons = [rollout.finish_reasons[i] for i in sequences.tolist()]
    weights[tokens] = training_weights(config, rollout.lengths[sequences], reasons, in_losses)
    deep = config.records.level == "deep"
    return _Work(work, tokens, weights, ranks, deep, place)


def _step(
    optimizer: Optimizer, work: _Work, losses_of: Callable[[MicroBatch], LossAndColumns]
) -> tuple[StepReport, list[Tensor]]:
    """One optimizer step, and the columns of the whole minibatch, [M] each.

    Losses are not reduced in autograd: the backward pass of each token starts from its weight.
    """
    by_micro_batch: list[Columns] = []

    def backward() -> None:
        for m in work.mine:
            loss, columns = losses_of(m)
            torch.autograd.backward(loss, work.weights[m.tokens])
            by_micro_batch.append(tuple(c.detach() for c in columns))

    report = optimizer.step(backward, work.ranks, work.by_tensor)
    return report, [torch.cat(column) for column in zip(*work.ranks.gather(by_micro_batch), strict=True)]


def _total(values: Tensor, weights: Tensor) -> float:
    """The sum of a minibatch's per-token losses, weighted by its loss weights, correctly rounded."""
    return math.fsum((values.to(torch.float64) * weights.to(torch.float64)).tolist())


def update(
    state: TrainState,
    rollout: Rollout,
    forward: ForwardPass,
    advantages: Advantages,
    config: RunConfig,
    ranks: Ranks,
    clock: Clock,
) -> Iterator[MinibatchUpdate]:
    """All optimizer steps of one iteration, in order; changes the weights in `state`, alike on every rank.

    Policy and value model each have a number of epochs, over the same minibatches. After a minibatch with more KL
    than `early_stop_kl` the policy takes no further step, nor does a value head on its trunk. `clock` gets the phases
    `update` and `digests`.
    """
    ppo, value = config.ppo, config.value
    value_epochs = ppo.epochs if not isinstance(value, SeparateValue) or value.epochs is None else value.epochs
    of_iteration = make_objective(state, rollout, forward, advantages, config)
    _set_learning_rates(state, config)
    corrections, stopped = of_iteration.policy.terms.corrections, False
    counted = None if corrections is None else corrections.counted
    for epoch in range(max(ppo.epochs, value_epochs)):
        shuffled = minibatches(len(rollout.lengths), ppo.minibatch_size, config.seed, state.iteration, epoch)
        for index, sequences in enumerate(shuffled):
            steps_policy = epoch < ppo.epochs and not stopped
            steps_value = state.value_optimizer is not None and epoch < value_epochs
            if not (steps_policy or steps_value):
                return
            work = _share_out(rollout, sequences, counted, config, ranks, (state.iteration, epoch, index))
            objective = of_iteration.of_step(epoch, index)
            policy: PolicyUpdate | None
            value_update: ValueUpdate | None
            if steps_policy and objective.value is not None and state.value_optimizer is None:
                policy, value_update = _joint_step(state, work, objective)
            else:
                policy = _policy_step(state, work, objective) if steps_policy else None
                value_update = _value_step(state, work, objective) if steps_value else None
            if policy is not None and ppo.early_stop_kl is not None:
                stopped = stopped or policy.approx_kl > ppo.early_stop_kl
            clock.lap("update")
            digests = _digests(state)
            clock.lap("digests")
            loss_weights = work.own_weights()
            yield MinibatchUpdate(epoch, index, work.tokens, loss_weights, policy, value_update, *digests)


def learning_rates(config: RunConfig, iteration: int) -> tuple[float, float | None]:
    """Learning rates of policy and value model in an iteration; None without a separate value model."""
    ppo = config.ppo
    factor = rate_factor(ppo.schedule, iteration, ppo.iterations, ppo.warmup_iterations)
    value = config.value.learning_rate * factor if isinstance(config.value, SeparateValue) else None
    return ppo.learning_rate * factor, value


def _set_learning_rates(state: TrainState, config: RunConfig) -> None:
    policy, value = learning_rates(config, state.iteration)
    state.policy_optimizer.settings = replace(state.policy_optimizer.settings, learning_rate=policy)
    if state.value_optimizer is not None and value is not None:
        state.value_optimizer.settings = replace(state.value_optimizer.settings, learning_rate=value)


def _digests(state: TrainState) -> tuple[str, str | None]:
    policy = weights_digest(state.policy.named_parameters())
    if state.value_model is None:
        return policy, None
    return policy, weights_digest(state.own_value_module.named_parameters())


def _with_chosen(objective: Objective, work: _Work, losses_of: Callable[[MicroBatch], LossAndColumns]) -> Objective:
    """The objective with the tokens that it changes in this minibatch, from a forward pass over all of it."""
    policy = objective.policy
    if not chooses_tokens(policy.terms.config):
        return objective
    of_micro_batches = [PolicyColumns(*losses_of(m)[1][:_POLICY_COLUMNS]).new_logprobs.detach() for m in work.mine]
    new_logprobs = torch.cat(work.ranks.gather(of_micro_batches))
    terms = with_chosen(policy.terms, work.tokens, new_logprobs, work.place)
    return replace(objective, policy=replace(policy, terms=terms))


def with_chosen(terms: PolicyTerms, tokens: Tensor, new_logprobs: Tensor, place: tuple[int, int, int]) -> PolicyTerms:
    """The terms with the tokens that Clip-Cov or KL-Cov changes in a minibatch of `tokens` [M], by `new_logprobs` [M].

    Tokens that are in no loss are in no mean and are not chosen. The terms as they are for other objectives.
    """
    if not chooses_tokens(terms.config):
        return terms
    if terms.corrections is not None and terms.corrections.counted is not None:
        counted = terms.corrections.counted[tokens]
        tokens, new_logprobs = tokens[counted], new_logprobs[counted]
    chosen = torch.zeros(len(terms.anchor), dtype=torch.bool)
    chosen[tokens] = chosen_tokens(terms.config, new_logprobs, terms.anchor[tokens], terms.advantages[tokens], place)
    return replace(terms, chosen=chosen)


def _policy_step(state: TrainState, work: _Work, objective: Objective) -> PolicyUpdate:
    objective = _with_chosen(objective, work, objective.policy.of)
    report, columns = _step(state.policy_optimizer, work, objective.policy.of)
    return policy_update(report, PolicyColumns(*columns), work.tokens, work.own_weights(), objective.policy.terms)


def _value_step(state: TrainState, work: _Work, objective: Objective) -> ValueUpdate:
    assert state.value_optimizer is not None and objective.value is not None
    report, columns = _step(state.value_optimizer, work, objective.value.of)
    token_losses, new_values = columns
    return value_update(report, token_losses, new_values, work.tokens, work.own_weights(), objective.value.terms)


def _joint_step(state: TrainState, work: _Work, objective: Objective) -> tuple[PolicyUpdate, ValueUpdate]:
    """One step on the losses of the policy and of the value head, both from the same hidden states."""
    objective = _with_chosen(objective, work, objective.joint)
    assert objective.value is not None
    report, (*of_policy, token_losses, new_values) = _step(state.policy_optimizer, work, objective.joint)
    about = work.tokens, work.own_weights()
    policy = policy_update(report, PolicyColumns(*of_policy), *about, objective.policy.terms)
    return policy, value_update(None, token_losses, new_values, *about, objective.value.terms)


def policy_update(
    report: StepReport, of: PolicyColumns, tokens: Tensor, weights: Tensor, policy: PolicyTerms
) -> PolicyUpdate:
    """What a step of the policy leaves: the columns of its minibatch `tokens` [M], and their sums by `weights` [M]."""
    flags, corrections = policy.flags(of.ratios, tokens), policy.corrections
    factors = None if corrections is None else corrections.weights[tokens]
    penalties, kl_terms = (part if len(part) else None for part in (of.penalty_terms, of.kl_terms))

    def weighted(part: Tensor) -> float:
        return _total(part if factors is None else part * factors, weights)

    return PolicyUpdate(
        new_logprobs=of.new_logprobs,
        ratios=of.ratios,
        clip_flags=flags,
        new_entropies=of.new_entropies,
        losses=of.losses,
        surrogates=of.surrogates,
        penalty_terms=penalties,
        importance_weights=factors,
        corrections=None if corrections is None else corrections.changes[tokens],
        kl_terms=kl_terms,
        loss=_total(of.losses, weights),
        surrogate_loss=weighted(of.surrogates),
        penalty_loss=None if penalties is None else weighted(penalties),
        entropy_loss=0.0 - _total(of.new_entropies * policy.config.ppo.entropy_coef, weights),
        kl_loss=None if kl_terms is None else _total(kl_terms, weights),
        entropy=mean_of(of.new_entropies),
        approx_kl=mean_of(kl.k3(policy.anchor[tokens] - of.new_logprobs)),
        clip_fraction=mean_of(losses.removes_gradient(flags)),
        grad_norm=report.grad_norm,
        gradients=report.gradients,
    )


def value_update(
    report: StepReport | None,
    token_losses: Tensor,
    new_values: Tensor,
    tokens: Tensor,
    weights: Tensor,
    value: ValueTerms,
) -> ValueUpdate:
    """The same of the value model. `report`: of its own step; None where the head shares the policy's."""
    clipped = value.clips(new_values, tokens)
    return ValueUpdate(
        new_values=new_values,
        clipped=clipped,
        losses=token_losses,
        loss=_total(token_losses, weights),
        clip_fraction=mean_of(clipped),
        grad_norm=None if report is None else report.grad_norm,
        gradients=() if report is None else report.gradients,
    )
