"""The only place that takes optimizer steps of a control run: minibatches of steps, one loss for both networks.

Actor and critic share no parameter, so one optimizer over both differs from two only in the gradient norm that is
clipped, which is over all parameters together, as in CleanRL and Stable-Baselines3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppo_repro.config.control import ControlConfig, ControlPPOConfig
from ppo_repro.control.buffers import Advantages, ForwardPass, MinibatchUpdate, Rollout
from ppo_repro.control.environments import Environments
from ppo_repro.control.networks import Agent
from ppo_repro.numerics.optimizer import SLOTS, Optimizer, StepReport, weights_digest
from ppo_repro.numerics.rows import alone, slots_of
from ppo_repro.numerics.sums import mean_of
from ppo_repro.ppo import kl
from ppo_repro.ppo.advantages import whiten
from ppo_repro.ppo.clip import Clip
from ppo_repro.ppo.objective import probability_ratios
from ppo_repro.ppo.schedules import rate_factor
from ppo_repro.ppo.value import value_losses
from ppo_repro.stages.training_batch import minibatches


@dataclass
class ControlState:
    """The one mutable object of a control run."""

    agent: Agent
    optimizer: Optimizer  # over both networks
    environments: Environments
    iteration: int = 0


@dataclass(frozen=True)
class Rates:
    """Learning rate and clip range of an iteration, after their schedules."""

    learning_rate: float
    clip_range: float


def rates(ppo: ControlPPOConfig, iteration: int) -> Rates:
    """Learning rate and clip range of `iteration`, from 0."""
    return Rates(
        ppo.learning_rate * rate_factor(ppo.learning_rate_schedule, iteration, ppo.iterations, 0),
        ppo.clip_range * rate_factor(ppo.clip_range_schedule, iteration, ppo.iterations, 0),
    )


@dataclass(frozen=True)
class _Minibatch:
    """The M steps of one optimizer step."""

    rows: Tensor  # [M] int64 index into the rollout
    observations: Tensor
    actions: Tensor
    anchor_logprobs: Tensor
    advantages: Tensor
    old_values: Tensor
    returns: Tensor


@dataclass(frozen=True)
class _Evaluated:
    """What the losses of a minibatch are computed from before the step, [M] each."""

    policy_losses: Tensor
    value_losses: Tensor
    new_logprobs: Tensor
    ratios: Tensor
    new_entropies: Tensor
    new_values: Tensor
    value_clipped: Tensor  # bool
    surrogates: Tensor


def update(
    state: ControlState, rollout: Rollout, forward: ForwardPass, advantages: Advantages, config: ControlConfig
) -> Iterator[MinibatchUpdate]:
    """All optimizer steps of one iteration, in order; changes the weights in `state`."""
    ppo, raw = config.ppo, advantages.raw_advantages
    current = rates(ppo, state.iteration)
    state.optimizer.settings = replace(state.optimizer.settings, learning_rate=current.learning_rate)
    whole = whiten(raw) if ppo.whiten_advantages == "iteration" else raw
    for epoch in range(ppo.epochs):
        batches = minibatches(len(raw), ppo.minibatch_size, config.seed, state.iteration, epoch)
        for index, rows in enumerate(batches):
            batch = _Minibatch(
                rows=rows,
                observations=rollout.observations[rows],
                actions=rollout.actions[rows],
                anchor_logprobs=rollout.rollout_logprobs[rows],
                advantages=whiten(whole[rows]) if ppo.whiten_advantages == "minibatch" else whole[rows],
                old_values=forward.values[rows],
                returns=advantages.returns[rows],
            )
            report, evaluated = _optimizer_step(state, batch, current, config)
            yield _record(state, epoch, index, batch, report, evaluated, current, ppo)


def _optimizer_step(
    state: ControlState, batch: _Minibatch, current: Rates, config: ControlConfig
) -> tuple[StepReport, _Evaluated]:
    """One step on surrogate - entropy_coef entropy + value_coef value loss, mean over the minibatch."""
    ppo, agent, total = config.ppo, state.agent, len(batch.rows)
    objective = Clip(current.clip_range, current.clip_range)
    micro_batches: list[tuple[Tensor, ...]] = []

    def backward() -> None:
        for steps in torch.arange(total).split(config.layout.update_micro_batch or total):
            observations = batch.observations[steps]
            rows = alone(len(steps), slots_of(steps.tolist(), total, SLOTS))
            outputs = agent.policy(observations, rows)
            logprobs, entropies = agent.distribution.statistics(outputs, batch.actions[steps], rows)
            ratios = probability_ratios(logprobs, batch.anchor_logprobs[steps])
            surrogate = objective.surrogates(ratios, batch.advantages[steps], logprobs)
            policy_loss = surrogate - entropies * ppo.entropy_coef
            values = agent.values(observations, rows)
            value_loss, value_clipped = value_losses(
                values, batch.old_values[steps], batch.returns[steps], ppo.value_clip_range
            )
            # autograd never reduces: each step begins with its share of the mean as its gradient
            share = torch.full_like(values, 1.0 / total)
            torch.autograd.backward([policy_loss, value_loss], [share, share * ppo.value_coef])
            columns = (policy_loss, value_loss, logprobs, ratios, entropies, values, value_clipped, surrogate)
            micro_batches.append(tuple(column.detach() for column in columns))

    report = state.optimizer.step(backward, by_tensor=config.records.level == "deep")
    return report, _Evaluated(*(torch.cat(column) for column in zip(*micro_batches, strict=True)))


def _record(
    state: ControlState,
    epoch: int,
    minibatch: int,
    batch: _Minibatch,
    report: StepReport,
    evaluated: _Evaluated,
    current: Rates,
    ppo: ControlPPOConfig,
) -> MinibatchUpdate:
    objective = Clip(current.clip_range, current.clip_range)
    return MinibatchUpdate(
        epoch=epoch,
        minibatch=minibatch,
        tokens=batch.rows,
        advantages=batch.advantages,
        new_logprobs=evaluated.new_logprobs,
        ratios=evaluated.ratios,
        clip_flags=objective.flags(evaluated.ratios, batch.advantages),
        new_values=evaluated.new_values,
        value_clipped=evaluated.value_clipped,
        new_entropies=evaluated.new_entropies,
        policy_losses=evaluated.policy_losses,
        surrogates=evaluated.surrogates,
        value_losses=evaluated.value_losses,
        policy_loss=mean_of(evaluated.policy_losses),
        surrogate_loss=mean_of(evaluated.surrogates),
        entropy_loss=0.0 - ppo.entropy_coef * mean_of(evaluated.new_entropies),
        value_loss=mean_of(evaluated.value_losses),
        approx_kl=mean_of(kl.k3(batch.anchor_logprobs - evaluated.new_logprobs)),
        learning_rate=current.learning_rate,
        clip_range=current.clip_range,
        joint_grad_norm=report.grad_norm,
        gradients=report.gradients,
        policy_digest=weights_digest(state.agent.policy_parameters()),
        value_digest=weights_digest(state.agent.value_parameters()),
    )
