"""The only place that takes optimizer steps of a control run: minibatches of steps, one loss for both networks.

Actor and critic share no parameter, so one optimizer over both differs from two only in the gradient norm that is
clipped, which is over all parameters together, as in CleanRL and Stable-Baselines3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppo_repro.config.control import ControlConfig
from ppo_repro.control.buffers import Advantages, ForwardPass, MinibatchUpdate, Rollout
from ppo_repro.control.environments import Environments
from ppo_repro.control.networks import Agent
from ppo_repro.numerics.optimizer import SLOTS, Optimizer, weights_digest
from ppo_repro.numerics.rows import alone, slots_of
from ppo_repro.numerics.sums import mean_of
from ppo_repro.ppo import kl
from ppo_repro.ppo.advantages import whiten
from ppo_repro.ppo.clip import Clip
from ppo_repro.ppo.objective import probability_ratios
from ppo_repro.ppo.schedules import rate_factor
from ppo_repro.ppo.value import value_losses
from ppo_repro.stages.training_batch import minibatches

Chunks = list[tuple[Tensor, ...]]


@dataclass
class ControlState:
    """The one mutable object of a control run."""

    agent: Agent
    optimizer: Optimizer  # over both networks
    environments: Environments
    iteration: int = 0


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
    cut = [minibatches(len(raw), ppo.minibatch_size, config.seed, index, epoch) for epoch in range(ppo.epochs)]
    for epoch, minibatch, tokens in [(e, m, tokens) for e, of in enumerate(cut) for m, tokens in enumerate(of)]:
        used = whiten(whole[tokens]) if ppo.whiten_advantages == "minibatch" else whole[tokens]
        by_chunk: Chunks = []

        def backward(tokens: Tensor = tokens, used: Tensor = used, by_chunk: Chunks = by_chunk) -> None:
            for steps in torch.arange(len(tokens)).split(config.layout.update_micro_batch or len(tokens)):
                chosen = tokens[steps]
                observations = rollout.observations[chosen]
                rows = alone(len(steps), slots_of(steps.tolist(), len(tokens), SLOTS))
                outputs = agent.policy(observations, rows)
                logprobs, entropies = agent.distribution.statistics(outputs, rollout.actions[chosen], rows)
                ratios = probability_ratios(logprobs, rollout.rollout_logprobs[chosen])
                surrogates = objective.surrogates(ratios, used[steps], logprobs)
                policy_loss = surrogates - entropies * ppo.entropy_coef
                values = agent.values(observations, rows)
                value_loss, clipped = value_losses(
                    values, forward.values[chosen], advantages.returns[chosen], ppo.value_clip_range
                )
                # autograd never reduces: each step begins with its part of the mean as its gradient
                part = torch.full_like(values, 1.0 / len(tokens))
                torch.autograd.backward([policy_loss, value_loss], [part, part * ppo.value_coef])
                columns = (policy_loss, value_loss, logprobs, ratios, entropies, values, clipped, surrogates)
                by_chunk.append(tuple(column.detach() for column in columns))

        report = state.optimizer.step(backward)
        policy_losses, losses, new_logprobs, ratios, entropies, new_values, value_clipped, surrogates = (
            torch.cat(column) for column in zip(*by_chunk, strict=True)
        )
        yield MinibatchUpdate(
            epoch=epoch,
            minibatch=minibatch,
            tokens=tokens,
            advantages=used,
            new_logprobs=new_logprobs,
            ratios=ratios,
            clip_flags=objective.flags(ratios, used),
            new_values=new_values,
            value_clipped=value_clipped,
            new_entropies=entropies,
            policy_losses=policy_losses,
            surrogates=surrogates,
            value_losses=losses,
            policy_loss=mean_of(policy_losses),
            surrogate_loss=mean_of(surrogates),
            entropy_loss=0.0 - ppo.entropy_coef * mean_of(entropies),
            value_loss=mean_of(losses),
            approx_kl=mean_of(kl.k3(rollout.rollout_logprobs[tokens] - new_logprobs)),
            learning_rate=learning_rate,
            clip_range=clip_range,
            joint_grad_norm=report.grad_norm,
            policy_digest=weights_digest(agent.policy_parameters()),
            value_digest=weights_digest(agent.value_parameters()),
        )
