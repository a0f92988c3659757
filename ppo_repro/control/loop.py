"""The PPO loop on environments. Read this first: each line of `control_iterations` is one stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ppo_repro.clock import OTHER, Clock
from ppo_repro.config.control import ControlConfig
from ppo_repro.control.buffers import Advantages, ForwardPass, MinibatchUpdate, Rollout
from ppo_repro.control.environments import make_environments
from ppo_repro.control.networks import Agent
from ppo_repro.control.stages import compute_advantages, evaluate, forward_pass, roll_out
from ppo_repro.control.update import ControlState, update
from ppo_repro.numerics import library
from ppo_repro.numerics.optimizer import AdamWSettings, Optimizer
from ppo_repro.stages.agreement import require_ratios_of_one, require_same_bits


@dataclass(frozen=True)
class ControlIteration:
    """Everything one iteration produced."""

    index: int
    eval_return: float | None  # before the first iteration only; None where not evaluated
    rollout: Rollout
    forward: ForwardPass
    advantages: Advantages
    updates: tuple[MinibatchUpdate, ...]
    seconds: dict[str, float]  # wall time by phase: evaluation, rollout, forward, update, other


def prepare(config: ControlConfig) -> ControlState:
    """Environments, networks and optimizer before the first iteration; UserError for what the user must correct."""
    ppo = config.ppo
    library.use_threads(config.layout.threads, config.numerics.mode == "native")
    environments = make_environments(config.environment.id, config.environment.num_envs, "training", config.seed)
    size = environments.observations.shape[1]
    agent = Agent(size, environments.actions, config.network, config.numerics.mode, config.seed)
    settings = AdamWSettings(ppo.learning_rate, 0.9, 0.999, ppo.adam_eps, 0.0, ppo.max_grad_norm)
    return ControlState(agent, Optimizer(agent, settings, config.numerics.mode), environments)


def control_iterations(config: ControlConfig, state: ControlState) -> Iterator[ControlIteration]:
    """Run PPO; yields after every update. `state` is trained in place.

    UnequalBits where bits differ that deterministic numerics promise to be equal.
    """
    while state.iteration < config.ppo.iterations:
        index, clock = state.iteration, Clock()
        due = index == 0 and config.evaluation.episodes > 0
        eval_return = evaluate(config, state.agent) if due else None
        clock.lap("evaluation")
        rollout = roll_out(config, state.agent, state.environments, index)
        clock.lap("rollout")
        forward = forward_pass(config, state.agent, rollout)
        if config.numerics.mode == "deterministic":
            drawn, scored = ("rollout_logprobs", rollout.rollout_logprobs), ("old_logprobs", forward.old_logprobs)
            require_same_bits(index, rollout.lengths, drawn, scored, torch.arange(len(rollout.rewards)))
        advantages = compute_advantages(config, rollout, forward)
        clock.lap("forward")
        updates = tuple(update(state, rollout, forward, advantages, config))
        if config.numerics.mode == "deterministic":
            tokens = updates[0].tokens
            require_ratios_of_one(index, rollout.lengths, updates[0].ratios, tokens)
            before, again = ("values", forward.values[tokens]), ("new_values", updates[0].new_values)
            require_same_bits(index, rollout.lengths, before, again, tokens)
        clock.lap("update")
        state.iteration += 1
        clock.lap(OTHER)
        yield ControlIteration(index, eval_return, rollout, forward, advantages, updates, clock.seconds)
