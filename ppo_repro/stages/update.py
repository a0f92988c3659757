"""Stage `MinibatchUpdate`: epochs of minibatches over one rollout, one optimizer step each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ppo_repro.buffers import Advantages, ForwardPass, MinibatchUpdate, PolicyUpdate, Rollout, ValueUpdate
from ppo_repro.clock import Clock
from ppo_repro.config.algorithm import SeparateValue
from ppo_repro.config.run import RunConfig
from ppo_repro.models.batches import MicroBatch, input_tokens, micro_batches
from ppo_repro.models.state import TrainState
from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic.grid import exact_mean
from ppo_repro.numerics.optim.optimizer import Optimizer, StepReport, weights_digest
from ppo_repro.ppo import kl, losses
from ppo_repro.ppo.schedules import rate_factor
from ppo_repro.ppo.weights import loss_weights
from ppo_repro.ranks import Ranks
from ppo_repro.seeding import permutation
from ppo_repro.stages.objective import Columns, LossAndColumns, Objective, PolicyLoss, ValueLoss, make_objective

A = TypeVar("A")
B = TypeVar("B")


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
    input_tokens: int  # of all ranks, prompts included
    ranks: Ranks


def _share_out(rollout: Rollout, sequences: Tensor, config: RunConfig, ranks: Ranks) -> _Work:
    layout = config.layout
    mine = sequences[torch.tensor(ranks.mine(len(sequences), layout.rank_shares), dtype=torch.int64)]
    work = micro_batches(rollout, mine, layout.update_micro_batch, layout.padding)
    tokens = rollout.tokens_of(sequences)
    weights = torch.zeros(len(rollout.response_ids))
    weights[tokens] = loss_weights(config.ppo.aggregation, rollout.lengths[sequences])
    return _Work(work, tokens, weights, input_tokens(rollout, sequences), ranks)


def _step(
    optimizer: Optimizer, work: _Work, losses_of: Callable[[MicroBatch], LossAndColumns]
) -> tuple[StepReport, list[Tensor]]:
    """One optimizer step, and the columns of its last backward pass over the whole minibatch, [M] each.

    Losses are not reduced in autograd: the backward pass of each token starts from its weight.
    """
    by_micro_batch: list[Columns] = []

    def backward() -> None:
        by_micro_batch.clear()
        for m in work.mine:
            loss, columns = losses_of(m)
            torch.autograd.backward(loss, work.weights[m.tokens])
            by_micro_batch.append(tuple(c.detach() for c in columns))

    report = optimizer.step(backward, work.input_tokens, work.ranks)
    return report, [torch.cat(column) for column in zip(*work.ranks.gather(by_micro_batch), strict=True)]


def _total(values: Tensor, work: _Work) -> float:
    """The weighted sum of a minibatch's per-token losses, correctly rounded."""
    return math.fsum((values.to(torch.float64) * work.weights[work.tokens].to(torch.float64)).tolist())


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
    objective = make_objective(state, rollout, forward, advantages, config)
    _set_learning_rates(state, config)
    stopped = False
    for epoch in range(max(ppo.epochs, value_epochs)):
        shuffled = minibatches(len(rollout.lengths), ppo.minibatch_size, config.seed, state.iteration, epoch)
        for index, sequences in enumerate(shuffled):
            steps_policy = epoch < ppo.epochs and not stopped
            steps_value = state.value_optimizer is not None and epoch < value_epochs
            if not (steps_policy or steps_value):
                return
            work = _share_out(rollout, sequences, config, ranks)
            policy: PolicyUpdate | None
            value_update: ValueUpdate | None
            if steps_policy and objective.value is not None and state.value_optimizer is None:
                policy, value_update = _joint_step(state, work, objective)
            else:
                policy, value_update = _together(
                    lambda: _policy_step(state, work, objective) if steps_policy else None,  # noqa: B023
                    lambda: _value_step(state, work, objective) if steps_value else None,  # noqa: B023
                    ranks,
                )
            if policy is not None and ppo.early_stop_kl is not None:
                stopped = stopped or policy.approx_kl > ppo.early_stop_kl
            clock.lap("update")
            digests = _digests(state, ranks)
            clock.lap("digests")
            yield MinibatchUpdate(epoch, index, work.tokens, policy, value_update, *digests)


def _together(first: Callable[[], A], second: Callable[[], B], ranks: Ranks) -> tuple[A, B]:
    """Both results. One process computes them side by side, several in one fixed order, so that collectives match."""
    return backend.side_by_side(first, second) if ranks.size == 1 else (first(), second())


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


def _digests(state: TrainState, ranks: Ranks) -> tuple[str, str | None]:
    return _together(
        lambda: weights_digest(state.policy.named_parameters()),
        lambda: None if state.value_model is None else weights_digest(state.value_parameters().items()),
        ranks,
    )


def _policy_step(state: TrainState, work: _Work, objective: Objective) -> PolicyUpdate:
    report, columns = _step(state.policy_optimizer, work, objective.policy.of)
    if state.value_optimizer is not None:
        state.forget(state.policy)  # before the value model's step: the operands are those of the old weights
    return _policy_update(report, columns, work, objective.policy)


def _value_step(state: TrainState, work: _Work, objective: Objective) -> ValueUpdate:
    assert state.value_optimizer is not None and objective.value is not None
    report, columns = _step(state.value_optimizer, work, objective.value.of)
    state.forget(state.value_model)
    return _value_update(report.grad_norm, report.redos, columns, work, objective.value)


def _joint_step(state: TrainState, work: _Work, objective: Objective) -> tuple[PolicyUpdate, ValueUpdate]:
    """One step on the losses of the policy and of the value head, both from the same hidden states."""
    assert objective.value is not None
    report, columns = _step(state.policy_optimizer, work, objective.joint)
    policy = _policy_update(report, columns[:-2], work, objective.policy)
    return policy, _value_update(None, 0, columns[-2:], work, objective.value)


def _policy_update(report: StepReport, columns: list[Tensor], work: _Work, policy: PolicyLoss) -> PolicyUpdate:
    token_losses, new_logprobs, ratios, entropies = columns
    tokens = work.tokens
    flags = policy.flags(ratios, tokens)
    return PolicyUpdate(
        new_logprobs=new_logprobs,
        ratios=ratios,
        clip_flags=flags,
        new_entropies=entropies,
        loss=_total(token_losses, work),
        entropy=exact_mean(entropies),
        approx_kl=exact_mean(kl.k3(policy.anchor[tokens] - new_logprobs)),
        clip_fraction=exact_mean(losses.removes_gradient(flags)),
        grad_norm=report.grad_norm,
        gradient_redos=report.redos,
    )


def _value_update(
    grad_norm: float | None, redos: int, columns: list[Tensor], work: _Work, value: ValueLoss
) -> ValueUpdate:
    token_losses, new_values = columns
    clipped = value.clips(new_values, work.tokens)
    return ValueUpdate(
        new_values=new_values,
        clipped=clipped,
        loss=_total(token_losses, work),
        clip_fraction=exact_mean(clipped),
        grad_norm=grad_norm,
        gradient_redos=redos,
    )
