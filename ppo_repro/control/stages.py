"""The stages of one control iteration: rollout, forward pass, advantages; and whole episodes for evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ppo_repro.config.control import ControlConfig
from ppo_repro.control.buffers import Advantages, ForwardPass, Rollout
from ppo_repro.control.environments import Environments, Transition, make_environments
from ppo_repro.control.networks import Agent
from ppo_repro.ppo.advantages import gae


@dataclass(frozen=True)
class _Steps:
    """What happened to the E copies, step by step: lists of [E, ...]."""

    observations: list[Tensor]
    actions: list[Tensor]
    logprobs: list[Tensor]
    transitions: list[Transition]


@dataclass(frozen=True)
class _Fragment:
    """Steps `first` to `last` of this iteration, both included, of one copy."""

    environment: int
    episode: int
    seed: int
    first: int
    last: int
    first_step: int  # of the episode
    end_reason: str


def _fragments(environment: int, start: tuple[int, int, int], seeds: list[int], ends: list[str]) -> list[_Fragment]:
    """Cut one copy's steps where episodes ended.

    `start`: (episode, seed, step) at which the iteration begins; `seeds`: of the episodes that begin in it;
    `ends`: for each step why the episode ended, "" where it went on.
    """
    fragments, first = [], 0
    episode, seed, step = start
    following = iter(seeds)
    for t, end in enumerate(ends):
        if not end and t < len(ends) - 1:
            continue
        fragments.append(_Fragment(environment, episode, seed, first, t, step, end or "cut"))
        if end:
            episode, seed, step, first = episode + 1, next(following), 0, t + 1
    return fragments


@torch.no_grad()
def roll_out(config: ControlConfig, agent: Agent, environments: Environments, iteration: int) -> Rollout:
    """Step every copy `steps_per_env` times, episodes going on from the iteration before."""
    horizon, copies = config.environment.steps_per_env, len(environments.slots)
    noise = agent.distribution.noise(horizon, copies, "actions", config.seed, iteration)
    starts = [(slot.episode, slot.seed, slot.steps) for slot in environments.slots]
    begun: list[list[int]] = [[] for _ in range(copies)]
    steps = _Steps([], [], [], [])
    for t in range(horizon):
        observations = torch.from_numpy(environments.observations.copy())
        outputs = agent.policy(observations)
        actions = agent.distribution.sample(outputs, noise[t])
        steps.observations.append(observations)
        steps.actions.append(actions)
        steps.logprobs.append(agent.distribution.statistics(outputs, actions)[0])
        transition = environments.step(actions.numpy())
        steps.transitions.append(transition)
        for i in np.flatnonzero(transition.terminated | transition.truncated):
            begun[i].append(environments.slots[i].seed)
    fragments = []
    for i in range(copies):
        ends = ["terminated" if t.terminated[i] else "truncated" if t.truncated[i] else "" for t in steps.transitions]
        fragments += _fragments(i, starts[i], begun[i], ends)
    return _in_order(steps, fragments)


def _in_order(steps: _Steps, fragments: list[_Fragment]) -> Rollout:
    def by_environment(steps: list[Tensor]) -> Tensor:
        return torch.stack(steps, 1).flatten(0, 1)

    transitions = steps.transitions
    return Rollout(
        observations=by_environment(steps.observations),
        actions=by_environment(steps.actions),
        rollout_logprobs=by_environment(steps.logprobs),
        rewards=by_environment([torch.from_numpy(t.rewards) for t in transitions]),
        lengths=torch.tensor([f.last - f.first + 1 for f in fragments]),
        final_observations=torch.from_numpy(
            np.stack([transitions[f.last].observations[f.environment] for f in fragments])
        ),
        end_reasons=tuple(f.end_reason for f in fragments),
        environments=tuple(f.environment for f in fragments),
        episodes=tuple(f.episode for f in fragments),
        seeds=tuple(f.seed for f in fragments),
        first_steps=tuple(f.first_step for f in fragments),
        last_steps=tuple(f.last for f in fragments),
        episode_returns=tuple(float(transitions[f.last].episode_returns[f.environment]) for f in fragments),
    )


@torch.no_grad()
def forward_pass(config: ControlConfig, agent: Agent, rollout: Rollout) -> ForwardPass:
    """Log-probs, entropies and values of the whole rollout, and the value that follows each fragment.

    That is 0 where the episode terminated, the critic's value of the last observation where the fragment was cut, and
    at a time limit one of the two, as `bootstrap_truncated` says.
    """
    old_logprobs, entropies = agent.distribution.statistics(agent.policy(rollout.observations), rollout.actions)
    goes_on = {"terminated": 0.0, "truncated": float(config.ppo.bootstrap_truncated), "cut": 1.0}
    follows = torch.tensor([goes_on[reason] for reason in rollout.end_reasons]) > 0
    after = agent.values(rollout.final_observations)
    return ForwardPass(
        old_logprobs=old_logprobs,
        entropies=entropies,
        values=agent.values(rollout.observations),
        final_values=torch.where(follows, after, 0.0),
    )


def compute_advantages(config: ControlConfig, rollout: Rollout, forward: ForwardPass) -> Advantages:
    """GAE within each fragment, and value targets."""
    ppo = config.ppo
    raw = gae(rollout.rewards, forward.values, rollout.lengths, forward.final_values, ppo.gamma, ppo.gae_lambda)
    return Advantages(raw_advantages=raw, returns=raw + forward.values)


@torch.no_grad()
def evaluate(config: ControlConfig, agent: Agent) -> float:
    """Mean return of whole episodes with the likeliest action; the same episodes every time. NaN for none."""
    count = config.evaluation.episodes
    if count == 0:
        return math.nan
    environments = make_environments(config.environment.id, count, "evaluation", config.seed)
    returns: dict[int, float] = {}
    while len(returns) < count:
        outputs = agent.policy(torch.from_numpy(environments.observations.copy()))
        transition = environments.step(agent.distribution.likeliest(outputs).numpy())
        for i in np.flatnonzero(transition.terminated | transition.truncated).tolist():
            returns.setdefault(i, float(transition.episode_returns[i]))
    environments.close()
    return math.fsum(returns.values()) / count
