"""PPO. Read this file first: rollout, scores, rewards, advantages, epochs, minibatches, ratio, clip, step.

The types between the stages are in `buffers.py`, the mathematics is in `ppo/`, the stages are in `stages/`.
Letters: B responses and N response tokens of an iteration, M tokens of a minibatch, n tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ppo_repro.base.clock import OTHER, Clock
from ppo_repro.base.ranks import Ranks
from ppo_repro.buffers import Iteration, MinibatchUpdate, PolicyUpdate, ValueUpdate
from ppo_repro.config.run import RunConfig
from ppo_repro.models.batches import MicroBatch
from ppo_repro.models.networks import ValueModel, hidden_states
from ppo_repro.models.state import Digests, Stream, TrainState
from ppo_repro.numerics.optimizer import Optimizer
from ppo_repro.ppo.losses import value_losses
from ppo_repro.sampler import Sampler
from ppo_repro.stages.advantages import compute_advantages
from ppo_repro.stages.coefficients import next_coefficients, set_learning_rates
from ppo_repro.stages.corrections import corrected
from ppo_repro.stages.cross_check import cross_check
from ppo_repro.stages.equal_bits import require_first_step_agrees, require_sampler_agrees
from ppo_repro.stages.evaluation import evaluate
from ppo_repro.stages.forward import kl_terms_of, policy_pass, score_rollout, values_in_reward_units
from ppo_repro.stages.minibatches import Minibatch, Schedule, micro_batches_of_rank, minibatch_of
from ppo_repro.stages.rewards import check_rewards, compute_rewards
from ppo_repro.stages.rollout import Task, choose_prompts, roll_out
from ppo_repro.stages.training_batch import TrainingBatch, ValueTargets, objective_batch, training_batch
from ppo_repro.stages.updates import (
    Columns,
    PolicyColumns,
    ValueColumns,
    detached,
    joined,
    policy_update,
    value_update,
)


def ppo_iterations(
    config: RunConfig, task: Task, state: TrainState, sampler: Sampler, ranks: Ranks
) -> Iterator[Iteration]:
    """Run PPO from `state.iteration` on, train `state` in place, and yield each iteration after its update.

    The processes of a run divide the responses among them; after each stage every process has the results of all
    responses.

    Args:
        config: the run's configuration.
        task: the prompts, and the functions that score the responses.
        state: networks, optimizers and coefficients; its `iteration` is the next one to run.
        sampler: samples with the policy in `state`.
        ranks: the processes of the run.

    Raises:
        PromiseBroken: the weights of two processes differ after an update.
        UnequalBits: bits differ that deterministic numerics promise to be equal.
    """
    first = state.iteration
    while state.iteration < config.ppo.iterations:
        index, coefficients, clock = state.iteration, state.coefficients, Clock()

        # before every n-th iteration: greedy decoding of the held-out prompts
        evaluation = evaluate(config, task, sampler, ranks) if index % config.evaluation.every == 0 else None
        clock.lap("evaluation")

        # sample responses
        prompts = choose_prompts(config, task, index)
        rollout = roll_out(config, task, sampler, prompts, ranks)
        state.free_sampler_memory()
        clock.lap("rollout")

        # score them with the networks as they are before the update
        received = task.received(rollout)  # the rollout itself, unless the run has a deliberate fault
        forward = score_rollout(state, received, config, ranks)
        require_sampler_agrees(config, index, rollout, forward)
        cross_check(config, state, received, forward, ranks)
        if index == first:
            check_rewards(task, rollout, ranks)
        rewards = compute_rewards(config, task, rollout, forward, coefficients.kl_coef, ranks)
        advantages = compute_advantages(config.advantages, rollout, forward, rewards, task.functions)
        clock.lap("forward")

        # take the optimizer steps
        batch = training_batch(config, coefficients, received, forward, advantages, task.functions)
        taken = list(update(config, state, batch, ranks, clock))
        updates = tuple(step for step, _ in taken)
        digests = tuple(pending.result() for _, pending in taken)
        state.free_update_memory()
        ranks.require_same("weights after an update", digests[-1])
        clock.lap("digests")
        require_first_step_agrees(config, index, rollout, forward, updates[0])

        state.coefficients = next_coefficients(config, coefficients, forward, advantages, updates, len(rollout.lengths))
        state.iteration += 1
        clock.lap(OTHER)
        yield Iteration(
            index=index,
            evaluation=evaluation,
            coefficients=coefficients,
            rollout=rollout,
            forward=forward,
            rewards=rewards,
            advantages=advantages,
            updates=updates,
            digests=digests,
            seconds=clock.seconds,
        )


def update(
    config: RunConfig, state: TrainState, batch: TrainingBatch, ranks: Ranks, clock: Clock
) -> Iterator[tuple[MinibatchUpdate, Digests]]:
    """Take all optimizer steps of one iteration, in order.

    `Schedule` has the epochs, their minibatches, and the early stop.

    Args:
        config: the run's configuration.
        state: its weights change in place, equally on every rank.
        batch: the N tokens of the iteration.
        ranks: each computes the gradients of its responses in a minibatch.
        clock: gets the phases `update` and `digests`.

    Yields:
        Each step, and the digests of the weights after it, which threads may still compute during the next step.
    """
    ppo, value = config.ppo, config.value
    set_learning_rates(state, ppo, value)
    separate, targets = state.separate_value, batch.value_targets
    if (targets is None) != (state.value_model is None):
        raise ValueError("a value model without targets, or targets without a value model")
    schedule = Schedule(config, state.iteration)
    for planned in schedule.planned_steps(len(batch.rollout.lengths)):
        own = micro_batches_of_rank(config.layout, ppo.replay_routes, batch.rollout, planned.sequences, ranks)
        minibatch = minibatch_of(ppo.aggregation, batch, planned.sequences, own)
        of_policy, of_value = None, None
        if planned.of_policy:
            stream = ("update", state.iteration, planned.epoch, planned.minibatch)
            of_policy, of_value = policy_step(config, state, batch, minibatch, ranks, stream)
            schedule.follow(of_policy)  # may end the policy's steps
        if separate is not None and targets is not None and planned.of_value:
            of_value = value_step(*separate, targets, minibatch, ranks)
        clock.lap("update")
        digests = state.digests()
        clock.lap("digests")
        step = MinibatchUpdate(
            epoch=planned.epoch,
            minibatch=planned.minibatch,
            tokens=minibatch.tokens,
            loss_weights=minibatch.loss_weights,
            policy=of_policy,
            value=of_value,
        )
        yield step, digests


def policy_step(
    config: RunConfig, state: TrainState, batch: TrainingBatch, minibatch: Minibatch, ranks: Ranks, stream: Stream
) -> tuple[PolicyUpdate, ValueUpdate | None]:
    """Take one optimizer step of the policy, which includes the value head if it is on the policy's trunk.

    Args:
        config: the run's configuration.
        state: its policy changes in place.
        batch: the N tokens of the iteration.
        minibatch: the M tokens of the step, and this rank's micro-batches of them.
        ranks: the gradients of all ranks are added.
        stream: names the step for the hook that may change hidden states.

    Returns:
        The updates of the policy and of the value head; None without a head.
    """
    head, targets = state.value_head, batch.value_targets

    def losses_of(m: MicroBatch) -> tuple[Tensor, tuple[PolicyColumns, ValueColumns | None]]:
        new = policy_pass(state, config.kl, config.numerics.mode, m, batch.rollout, stream)
        kl_terms = kl_terms_of(batch, m.tokens, new.logprobs, new.exact_kl)
        of_policy = policy_loss(batch, m.tokens, new.logprobs, new.entropies, kl_terms)
        if head is None or targets is None:
            return of_policy.losses, (of_policy, None)
        new_values = values_in_reward_units(head, targets.statistics, new.hidden, m)
        of_value = value_loss(targets, m.tokens, new_values)
        return of_policy.losses + of_value.losses * targets.coef, (of_policy, of_value)

    grad_norm, (of_policy, of_value) = optimizer_step(state.policy_optimizer, minibatch, ranks, losses_of)
    updated_head = None if of_value is None else value_update(minibatch, of_value, None)
    return policy_update(batch, minibatch, of_policy, grad_norm), updated_head


def policy_loss(
    batch: TrainingBatch,
    tokens: Tensor,
    new_logprobs: Tensor,
    new_entropies: Tensor,
    kl_terms: Tensor | None,
) -> PolicyColumns:
    """Compute the loss of n tokens of whole responses: w (surrogate + penalty) - entropy_coef entropy + KL term.

    w is the importance weight of the token, 1 unless importance weights are configured.

    The surrogate of PPO's clip is -min(r A, clip(r, 1 - eps, 1 + eps) A) with r = pi_new / pi_anchor (Schulman et al.,
    2017, equation 7). A user's objective returns its own surrogate.

    Args:
        batch: the N tokens of the iteration; gives anchor log-probs, advantages, objective, w and entropy_coef.
        tokens: [n] int64, index of the tokens into the N.
        new_logprobs: [n] float32, nats, differentiable.
        new_entropies: [n] float32, nats, differentiable.
        kl_terms: [n] float32, already times kl_coef; None unless the loss has a KL.

    Returns:
        The losses [n] float32, not reduced, and their terms.
    """
    of_tokens = objective_batch(batch, tokens, new_logprobs, new_entropies)
    surrogates, penalties, flags = batch.objective.losses(of_tokens)

    loss = surrogates if penalties is None else surrogates + penalties
    if batch.corrections is not None:
        loss = corrected(loss, batch.corrections.weights[tokens])
    loss = loss - new_entropies * batch.entropy_coef
    if kl_terms is not None:
        loss = loss + kl_terms
    return PolicyColumns(
        losses=loss,
        new_logprobs=new_logprobs,
        ratios=of_tokens.ratios,
        clip_flags=flags,
        new_entropies=new_entropies,
        surrogates=surrogates,
        penalty_terms=penalties,
        kl_terms=kl_terms,
    )


def value_step(
    model: ValueModel, optimizer: Optimizer, targets: ValueTargets, minibatch: Minibatch, ranks: Ranks
) -> ValueUpdate:
    """Take one optimizer step of a value model with a trunk of its own.

    Args:
        model: its weights change in place.
        optimizer: of the model.
        targets: of the N tokens of the iteration.
        minibatch: the M tokens of the step, and this rank's micro-batches of them.
        ranks: the gradients of all ranks are added.
    """

    def losses_of(m: MicroBatch) -> tuple[Tensor, ValueColumns]:
        new_values = values_in_reward_units(model, targets.statistics, hidden_states(model.trunk, m.batch), m)
        columns = value_loss(targets, m.tokens, new_values)
        return columns.losses, columns

    grad_norm, columns = optimizer_step(optimizer, minibatch, ranks, losses_of)
    return value_update(minibatch, columns, grad_norm)


def value_loss(targets: ValueTargets, tokens: Tensor, new_values: Tensor) -> ValueColumns:
    """Return 1/2 (V - R)^2, plain or clipped, of n tokens: [n] float32, in squared units of the returns' scale."""
    old_values, returns, statistics = targets.old_values[tokens], targets.returns[tokens], targets.statistics
    losses, clipped = value_losses(new_values, old_values, returns, targets.clip_range)
    if statistics.count:
        losses = losses * (1.0 / (statistics.scale * statistics.scale))
    return ValueColumns(losses=losses, new_values=new_values, clipped=clipped)


def optimizer_step(
    optimizer: Optimizer,
    minibatch: Minibatch,
    ranks: Ranks,
    losses_of: Callable[[MicroBatch], tuple[Tensor, Columns]],
) -> tuple[float, Columns]:
    """Take one AdamW step on the weighted sum of a minibatch's losses.

    The losses are not summed in autograd: the backward pass of each token starts from its weight.

    Args:
        optimizer: of the policy or of the value model.
        minibatch: its micro-batches, and the weight [N] float32 of each token's loss.
        ranks: each returns the columns of its responses.
        losses_of: returns the losses [n] float32 of a micro-batch, and its columns for the records.

    Returns:
        The norm of the gradient before clipping, and the columns [M] of the minibatch's tokens.
    """
    columns: list[Columns] = []

    def backward() -> None:
        for m in minibatch.micro_batches:
            loss, of_tokens = losses_of(m.with_sums(optimizer.sink))
            torch.autograd.backward(loss, minibatch.loss_weights_of_all[m.tokens])
            columns.append(detached(of_tokens))

    grad_norm = optimizer.step(backward)
    return grad_norm, joined(ranks.gather(columns))
