"""The stages of one control iteration: rollout, forward pass, advantages; and whole episodes for evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ppo_repro.config.run import ControlConfig
from ppo_repro.control.buffers import Advantages, ForwardPass, Rollout
from ppo_repro.control.environments import Environments, Transition, make_environments
from ppo_repro.control.networks import Agent
from ppo_repro.ppo.advantages import gae


@torch.no_grad()
def roll_out(config: ControlConfig, agent: Agent, environments: Environments, iteration: int) -> Rollout:
    """Step every copy `steps_per_env` times, episodes going on from the iteration before."""
    horizon, copies = config.environment.steps_per_env, len(environments.slots)
    noise = agent.distribution.noise(horizon, copies, "actions", config.seed, iteration)
    # of each copy the episodes that its steps belong to, as (episode, seed, its step at which the fragment begins)
    begun = [[(slot.episode, slot.seed, slot.steps)] for slot in environments.slots]
    columns: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    transitions: list[Transition] = []
    for t in range(horizon):
        observations = torch.from_numpy(environments.observations.copy())
        outputs = agent.policy(observations)
        actions = agent.distribution.sample(outputs, noise[t])
        logprobs = agent.distribution.statistics(outputs, actions)[0]
        transitions.append(environments.step(actions.numpy()))
        columns.append((observations, actions, logprobs, torch.from_numpy(transitions[-1].rewards)))
        for i in np.flatnonzero(transitions[-1].terminated | transitions[-1].truncated):
            begun[i].append((environments.slots[i].episode, environments.slots[i].seed, 0))
    # (copy, last step of the iteration, length, why it ends there, episode, seed, first step of the episode)
    fragments = [
        (i, *end, *begun[i][number]) for i in range(copies) for number, end in enumerate(_ends(i, transitions))
    ]
    copy, last, lengths, reasons, episodes, seeds, first_steps = zip(*fragments, strict=True)
    # [T, E, ...] of every column, environment by environment
    observed, acted, logprobs, rewards = (torch.stack(column, 1).flatten(0, 1) for column in zip(*columns, strict=True))
    return Rollout(
        observations=observed,
        actions=acted,
        rollout_logprobs=logprobs,
        rewards=rewards,
        lengths=torch.tensor(lengths),
        final_observations=torch.from_numpy(
            np.stack([transitions[t].observations[i] for i, t in zip(copy, last, strict=True)])
        ),
        end_reasons=reasons,
        environments=copy,
        episodes=episodes,
        seeds=seeds,
        first_steps=first_steps,
        last_steps=last,
        episode_returns=tuple(float(transitions[t].episode_returns[i]) for i, t in zip(copy, last, strict=True)),
    )


def _ends(copy: int, transitions: Sequence[Transition]) -> Iterator[tuple[int, int, str]]:
    """Of each fragment of one copy its last step, its length, and why it ends."""
    first = 0
    for t, transition in enumerate(transitions):
        ended = transition.terminated[copy] or transition.truncated[copy]
        if ended or t == len(transitions) - 1:
            reason = "terminated" if transition.terminated[copy] else "truncated" if ended else "cut"
            yield t, t - first + 1, reason
            first = t + 1


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
