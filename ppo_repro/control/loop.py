"""The PPO loop on environments. Read this first: each line of `control_iterations` is one stage.

Actor and critic share no parameter, so one optimizer over both differs from two only in the gradient norm that is
clipped, which is over all parameters together, as in CleanRL and Stable-Baselines3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppo_repro.clock import OTHER, Clock
from ppo_repro.config.run import ControlConfig
from ppo_repro.control.buffers import Advantages, ForwardPass, MinibatchUpdate, Rollout
from ppo_repro.control.environments import Environments, make_environments
from ppo_repro.control.networks import Agent
from ppo_repro.control.stages import compute_advantages, evaluate, forward_pass, roll_out
from ppo_repro.numerics import library
from ppo_repro.numerics.optimizer import SLOTS, AdamWSettings, Optimizer, weights_digest
from ppo_repro.numerics.rows import alone, slots_of
from ppo_repro.numerics.sums import mean_of
from ppo_repro.ppo import kl
from ppo_repro.ppo.advantages import whiten
from ppo_repro.ppo.clip import Clip
from ppo_repro.ppo.controllers import rate_factor
from ppo_repro.ppo.objective import probability_ratios
from ppo_repro.ppo.value import value_losses
from ppo_repro.stages.agreement import require_ratios_of_one, require_same_bits
from ppo_repro.stages.training_batch import minibatches


@dataclass
class ControlState:
    """The one mutable object of a control run."""

    agent: Agent
    optimizer: Optimizer  # over both networks
    environments: Environments
    iteration: int = 0


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


def update(
    state: ControlState, rollout: Rollout, forward: ForwardPass, advantages: Advantages, config: ControlConfig
) -> Iterator[MinibatchUpdate]:
    """All optimizer steps of one iteration, in order; changes the weights in `state`.

    A step is on surrogate - entropy_coef entropy + value_coef value loss, mean over the minibatch.
    """
    ppo, agent, raw, index = config.ppo, state.agent, advantages.raw_advantages, state.iteration
    learning_rate = ppo.learning_rate * rate_factor(ppo.learning_rate_schedule, index, ppo.iterations, 0)
    clip_range = ppo.clip_range * rate_factor(ppo.clip_range_schedule, index, ppo.iterations, 0)
    objective = Clip(clip_range, clip_range)
    state.optimizer.settings = replace(state.optimizer.settings, learning_rate=learning_rate)
    whole = whiten(raw) if ppo.whiten_advantages == "iteration" else raw
    steps = [
        (epoch, minibatch, tokens)
        for epoch in range(ppo.epochs)
        for minibatch, tokens in enumerate(minibatches(len(raw), ppo.minibatch_size, config.seed, index, epoch))
    ]
    for epoch, minibatch, tokens in steps:
        used = whiten(whole[tokens]) if ppo.whiten_advantages == "minibatch" else whole[tokens]
        by_chunk: list[dict[str, Tensor]] = []

        def backward(
            tokens: Tensor = tokens, used: Tensor = used, by_chunk: list[dict[str, Tensor]] = by_chunk
        ) -> None:
            for chunk in torch.arange(len(tokens)).split(config.layout.update_micro_batch or len(tokens)):
                chosen = tokens[chunk]
                observations = rollout.observations[chosen]
                rows = alone(len(chunk), slots_of(chunk.tolist(), len(tokens), SLOTS))
                outputs = agent.policy(observations, rows)
                logprobs, entropies = agent.distribution.statistics(outputs, rollout.actions[chosen], rows)
                ratios = probability_ratios(logprobs, rollout.rollout_logprobs[chosen])
                surrogates = objective.surrogates(ratios, used[chunk], logprobs)
                policy_losses = surrogates - entropies * ppo.entropy_coef
                values = agent.values(observations, rows)
                losses, clipped = value_losses(
                    values, forward.values[chosen], advantages.returns[chosen], ppo.value_clip_range
                )
                # autograd never reduces: each step begins with its part of the mean as its gradient
                part = torch.full_like(values, 1.0 / len(tokens))
                torch.autograd.backward([policy_losses, losses], [part, part * ppo.value_coef])
                columns = {
                    "new_logprobs": logprobs,
                    "ratios": ratios,
                    "new_values": values,
                    "value_clipped": clipped,
                    "new_entropies": entropies,
                    "policy_losses": policy_losses,
                    "surrogates": surrogates,
                    "value_losses": losses,
                }
                by_chunk.append({name: column.detach() for name, column in columns.items()})

        grad_norm = state.optimizer.step(backward)
        joined = {name: torch.cat([columns[name] for columns in by_chunk]) for name in by_chunk[0]}
        yield MinibatchUpdate(
            **joined,
            epoch=epoch,
            minibatch=minibatch,
            tokens=tokens,
            advantages=used,
            clip_flags=objective.flags(joined["ratios"], used),
            policy_loss=mean_of(joined["policy_losses"]),
            surrogate_loss=mean_of(joined["surrogates"]),
            entropy_loss=0.0 - ppo.entropy_coef * mean_of(joined["new_entropies"]),
            value_loss=mean_of(joined["value_losses"]),
            approx_kl=mean_of(kl.k3(rollout.rollout_logprobs[tokens] - joined["new_logprobs"])),
            learning_rate=learning_rate,
            clip_range=clip_range,
            joint_grad_norm=grad_norm,
            policy_digest=weights_digest(agent.policy_parameters()),
            value_digest=weights_digest(agent.value_parameters()),
        )
