"""PPO on environments. Read `control_iterations` first: each of its lines is a stage, and the stages follow it.

Actor and critic share no parameter, and one optimizer steps on both. Two optimizers would differ only in clipping: here
the norm is over the gradients of both, as in CleanRL and Stable-Baselines3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ppo_repro.base.clock import OTHER, Clock
from ppo_repro.base.processes import SLOTS
from ppo_repro.config.control import ControlConfig
from ppo_repro.control.buffers import Advantages, ControlIteration, ForwardPass, MinibatchUpdate, Rollout
from ppo_repro.control.environments import Environments
from ppo_repro.control.networks import Agent
from ppo_repro.numerics import library
from ppo_repro.numerics.adamw import AdamWSettings
from ppo_repro.numerics.optimizer import Optimizer
from ppo_repro.numerics.sequences import single_row_sequences, slots_of
from ppo_repro.numerics.sums import mean_of
from ppo_repro.numerics.weights import weights_digest
from ppo_repro.ppo import kl
from ppo_repro.ppo.advantages import gae, whiten
from ppo_repro.ppo.controllers import rate_factor
from ppo_repro.ppo.losses import value_losses
from ppo_repro.ppo.objectives import Clip, probability_ratios
from ppo_repro.stages.equal_bits import NamedValues, require_ratios_of_one, require_same_bits
from ppo_repro.stages.minibatches import minibatches
from ppo_repro.stages.updates import detached, joined


@dataclass
class ControlState:
    """The one mutable object of a control run."""

    agent: Agent
    optimizer: Optimizer  # over both networks
    environments: Environments
    iteration: int = 0


def prepare(config: ControlConfig) -> ControlState:
    """Make environments, networks and optimizer before the first iteration. Raises UserError for wrong input."""
    ppo = config.ppo
    library.use_threads(config.layout.threads, config.numerics.mode == "native")
    environments = Environments(config.environment.id, config.environment.num_envs, "training", config.seed)
    size = environments.observations.shape[1]
    agent = Agent(size, environments.actions, config.network, config.numerics.mode, config.seed)
    settings = AdamWSettings(
        learning_rate=ppo.learning_rate, beta2=0.999, eps=ppo.adam_eps, max_grad_norm=ppo.max_grad_norm
    )
    return ControlState(agent, Optimizer(agent, settings, config.numerics.mode), environments)


def control_iterations(config: ControlConfig, state: ControlState) -> Iterator[ControlIteration]:
    """Run PPO, train `state` in place, and yield each iteration after its update.

    Raises UnequalBits if bits differ that deterministic numerics promise to be equal.
    """
    is_exact = config.numerics.mode == "deterministic"
    while state.iteration < config.ppo.iterations:
        index, clock = state.iteration, Clock()
        due = index == 0 and config.evaluation.episodes > 0
        eval_return = evaluate(config, state.agent) if due else None
        clock.lap("evaluation")

        rollout = roll_out(config, state.agent, state.environments, index)
        clock.lap("rollout")

        forward = forward_pass(config, state.agent, rollout)
        if is_exact:
            drawn = NamedValues("rollout_logprobs", rollout.rollout_logprobs)
            scored = NamedValues("old_logprobs", forward.old_logprobs)
            require_same_bits(index, rollout.lengths, drawn, scored, torch.arange(len(rollout.rewards)))
        advantages = compute_advantages(config, rollout, forward)
        clock.lap("forward")

        updates = tuple(update(state, rollout, forward, advantages, config))
        if is_exact:
            first, tokens = updates[0], updates[0].tokens
            require_ratios_of_one(index, rollout.lengths, first.ratios, tokens)
            before, again = NamedValues("values", forward.values[tokens]), NamedValues("new_values", first.new_values)
            require_same_bits(index, rollout.lengths, before, again, tokens)
        clock.lap("update")

        state.iteration += 1
        clock.lap(OTHER)
        yield ControlIteration(index, eval_return, rollout, forward, advantages, updates, clock.seconds)


@torch.no_grad()
def evaluate(config: ControlConfig, agent: Agent) -> float:
    """Play whole episodes with the likeliest action, the same episodes every time.

    Returns their mean return, NaN if there are none.
    """
    count = config.evaluation.episodes
    if count == 0:
        return math.nan
    returns: dict[int, float] = {}
    with closing(Environments(config.environment.id, count, "evaluation", config.seed)) as environments:
        while len(returns) < count:
            outputs = agent.policy(torch.from_numpy(environments.observations.copy()))
            transition = environments.step(agent.distribution.likeliest(outputs).numpy())
            for i in np.flatnonzero(transition.terminated | transition.truncated).tolist():
                returns.setdefault(i, float(transition.episode_returns[i]))
    return math.fsum(returns.values()) / count


class _Begun(NamedTuple):
    """The start of an episode's steps within an iteration."""

    iteration_step: int
    episode: int
    seed: int
    episode_step: int


class _Fragment(NamedTuple):
    """The steps of one episode within an iteration, in one copy of the environment."""

    environment: int
    begun: _Begun
    last_step: int  # of the iteration
    length: int
    end_reason: str
    episode_return: float
    final_observation: NDArray[np.float32]


@torch.no_grad()
def roll_out(config: ControlConfig, agent: Agent, environments: Environments, iteration: int) -> Rollout:
    """Take `steps_per_env` steps in every copy, and continue the episodes of the previous iteration.

    The steps come environment by environment, in fragments of episodes. `iteration` names the random streams.
    """
    horizon, copies = config.environment.steps_per_env, environments.copies
    noise = agent.distribution.noise(horizon, len(copies), "actions", config.seed, iteration)
    steps: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    begun = [_Begun(0, copy.episode, copy.seed, copy.steps) for copy in copies]
    fragments: list[list[_Fragment]] = [[] for _ in copies]
    for t in range(horizon):
        observations = torch.from_numpy(environments.observations.copy())
        outputs = agent.policy(observations)
        actions = agent.distribution.sample(outputs, noise[t])
        logprobs = agent.distribution.statistics(outputs, actions)[0]
        after = environments.step(actions.numpy())
        steps.append((observations, actions, logprobs, torch.from_numpy(after.rewards)))
        for i, copy in enumerate(copies):
            ended = after.terminated[i] or after.truncated[i]
            if ended or t == horizon - 1:
                reason = "terminated" if after.terminated[i] else "truncated" if ended else "cut"
                length, episode_return = t - begun[i].iteration_step + 1, float(after.episode_returns[i])
                fragments[i].append(_Fragment(i, begun[i], t, length, reason, episode_return, after.observations[i]))
                begun[i] = _Begun(t + 1, copy.episode, copy.seed, 0)
    recorded = list(chain.from_iterable(fragments))
    # [T, E, ...] of every column, environment by environment
    observed, acted, logprobs, rewards = (torch.stack(column, 1).flatten(0, 1) for column in zip(*steps, strict=True))
    return Rollout(
        observations=observed,
        actions=acted,
        rollout_logprobs=logprobs,
        rewards=rewards,
        lengths=torch.tensor([f.length for f in recorded]),
        final_observations=torch.from_numpy(np.stack([f.final_observation for f in recorded])),
        end_reason=tuple(f.end_reason for f in recorded),
        environment=tuple(f.environment for f in recorded),
        episode=tuple(f.begun.episode for f in recorded),
        seed=tuple(f.begun.seed for f in recorded),
        first_step=tuple(f.begun.episode_step for f in recorded),
        last_step=tuple(f.last_step for f in recorded),
        episode_return=tuple(f.episode_return for f in recorded),
    )


@torch.no_grad()
def forward_pass(config: ControlConfig, agent: Agent, rollout: Rollout) -> ForwardPass:
    """Compute log-probs, entropies and values of the whole rollout, and the value after each fragment.

    The value after a fragment is 0 if the episode terminated, and the critic's value of the last observation if the
    fragment was cut; at a time limit, `bootstrap_truncated` chooses between them.
    """
    old_logprobs, entropies = agent.distribution.statistics(agent.policy(rollout.observations), rollout.actions)
    goes_on = {"terminated": False, "truncated": config.ppo.bootstrap_truncated, "cut": True}
    follows = torch.tensor([goes_on[reason] for reason in rollout.end_reason])
    return ForwardPass(
        old_logprobs=old_logprobs,
        entropies=entropies,
        values=agent.values(rollout.observations),
        final_values=torch.where(follows, agent.values(rollout.final_observations), 0.0),
    )


def compute_advantages(config: ControlConfig, rollout: Rollout, forward: ForwardPass) -> Advantages:
    """Compute GAE within each fragment, and the value targets."""
    ppo = config.ppo
    raw = gae(rollout.rewards, forward.values, rollout.lengths, forward.final_values, ppo.gamma, ppo.gae_lambda)
    return Advantages(raw_advantages=raw, returns=raw + forward.values)


def update(
    state: ControlState, rollout: Rollout, forward: ForwardPass, advantages: Advantages, config: ControlConfig
) -> Iterator[MinibatchUpdate]:
    """Take all optimizer steps of one iteration, in order. The weights of `state` change in place."""
    ppo, agent, raw, index = config.ppo, state.agent, advantages.raw_advantages, state.iteration
    learning_rate = ppo.learning_rate * rate_factor(ppo.learning_rate_schedule, index, ppo.iterations, 0)
    clip_range = ppo.clip_range * rate_factor(ppo.clip_range_schedule, index, ppo.iterations, 0)
    objective = Clip(clip_range, clip_range)
    state.optimizer.settings = replace(state.optimizer.settings, learning_rate=learning_rate)
    iteration_advantages = whiten(raw) if ppo.whiten_advantages == "iteration" else raw
    steps = [
        (epoch, minibatch, tokens)
        for epoch in range(ppo.epochs)
        for minibatch, tokens in enumerate(minibatches(len(raw), ppo.minibatch_size, config.seed, index, epoch))
    ]
    for epoch, minibatch, tokens in steps:
        minibatch_advantages = iteration_advantages[tokens]
        if ppo.whiten_advantages == "minibatch":
            minibatch_advantages = whiten(minibatch_advantages)
        batch = _Minibatch(
            observations=rollout.observations[tokens],
            actions=rollout.actions[tokens],
            rollout_logprobs=rollout.rollout_logprobs[tokens],
            advantages=minibatch_advantages,
            old_values=forward.values[tokens],
            returns=advantages.returns[tokens],
        )
        grad_norm, columns = optimizer_step(state, batch, objective, config)
        yield MinibatchUpdate(
            **columns._asdict(),
            epoch=epoch,
            minibatch=minibatch,
            tokens=tokens,
            advantages=minibatch_advantages,
            clip_flags=objective.flags(columns.ratios, minibatch_advantages),
            policy_loss=mean_of(columns.policy_losses),
            surrogate_loss=mean_of(columns.surrogates),
            entropy_loss=0.0 - ppo.entropy_coef * mean_of(columns.new_entropies),
            value_loss=mean_of(columns.value_losses),
            approx_kl=mean_of(kl.k3(batch.rollout_logprobs - columns.new_logprobs)),
            learning_rate=learning_rate,
            clip_range=clip_range,
            joint_grad_norm=grad_norm,
            policy_digest=weights_digest(agent.policy_parameters()),
            value_digest=weights_digest(agent.value_parameters()),
        )


class _Minibatch(NamedTuple):
    """The inputs of the losses of M environment steps, float32."""

    observations: Tensor  # [M, O]
    actions: Tensor  # [M, A]
    rollout_logprobs: Tensor  # [M]
    advantages: Tensor  # [M]
    old_values: Tensor  # [M]
    returns: Tensor  # [M]


class _Columns(NamedTuple):
    """The outputs of both networks for n environment steps, and the terms of their losses, [n] each."""

    new_logprobs: Tensor
    ratios: Tensor
    new_values: Tensor
    value_clipped: Tensor
    new_entropies: Tensor
    policy_losses: Tensor
    surrogates: Tensor
    value_losses: Tensor


def optimizer_step(
    state: ControlState, batch: _Minibatch, objective: Clip, config: ControlConfig
) -> tuple[float, _Columns]:
    """Take one step on surrogate - entropy_coef entropy + value_coef value loss, mean over the minibatch.

    Return the norm of the gradient before clipping, and the columns [M] of the minibatch, computed before the step.
    """
    ppo, agent, count = config.ppo, state.agent, len(batch.advantages)
    by_micro_batch: list[_Columns] = []

    def backward() -> None:
        for steps in torch.arange(count).split(config.layout.update_micro_batch or count):
            micro_batch = _Minibatch(*(column[steps] for column in batch))
            rows = single_row_sequences(len(steps), slots_of(steps.tolist(), count, SLOTS), state.optimizer.sink)
            outputs = agent.policy(micro_batch.observations, rows)
            logprobs, entropies = agent.distribution.statistics(outputs, micro_batch.actions, rows)
            ratios = probability_ratios(logprobs, micro_batch.rollout_logprobs)
            surrogates = objective.surrogates(ratios, micro_batch.advantages, logprobs)
            policy_losses = surrogates - entropies * ppo.entropy_coef
            values = agent.values(micro_batch.observations, rows)
            losses, clipped = value_losses(values, micro_batch.old_values, micro_batch.returns, ppo.value_clip_range)
            # autograd never reduces: each step begins with its part of the mean as its gradient
            weights = torch.full_like(values, 1.0 / count)
            torch.autograd.backward([policy_losses, losses], [weights, weights * ppo.value_coef])
            columns = _Columns(
                new_logprobs=logprobs,
                ratios=ratios,
                new_values=values,
                value_clipped=clipped,
                new_entropies=entropies,
                policy_losses=policy_losses,
                surrogates=surrogates,
                value_losses=losses,
            )
            by_micro_batch.append(detached(columns))

    grad_norm = state.optimizer.step(backward)
    return grad_norm, joined(by_micro_batch)
