"""The PPO loop. Read this file first: each call in `ppo_iterations` is one stage and returns one frozen type.

The stages are the functions of `stages/`, their types are in `buffers.py`, the mathematics is in `ppo/`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ppo_repro.buffers import Iteration
from ppo_repro.clock import OTHER, Clock
from ppo_repro.config.run import RunConfig
from ppo_repro.models.state import TrainState
from ppo_repro.ranks import Ranks
from ppo_repro.rollout.engine import Engine
from ppo_repro.stages.advantages import compute_advantages
from ppo_repro.stages.agreement import require_first_step_agrees, require_sampler_agrees
from ppo_repro.stages.coefficients import next_coefficients
from ppo_repro.stages.evaluation import evaluate
from ppo_repro.stages.faults import as_trained
from ppo_repro.stages.forward import score_rollout
from ppo_repro.stages.prompts import Task, choose_prompts
from ppo_repro.stages.rewards import compute_rewards
from ppo_repro.stages.rollout import roll_out
from ppo_repro.stages.update import update


def ppo_iterations(
    config: RunConfig, task: Task, state: TrainState, engine: Engine, ranks: Ranks
) -> Iterator[Iteration]:
    """Run PPO from `state.iteration` on, training `state` in place; yields each iteration after its update.

    The processes of a run divide the sequences of generating, scoring and updating among them; afterwards every
    process holds the whole stage. PromiseBroken where their weights differ after an update, UnequalBits where bits
    differ that exact numerics promise to be equal.
    """
    while state.iteration < config.ppo.iterations:
        index, coefficients, clock = state.iteration, state.coefficients, Clock()

        # before every n-th iteration: greedy decoding of the held-out prompts
        evaluation = evaluate(config, task, engine, ranks) if index % config.evaluation.every == 0 else None
        clock.lap("evaluation")

        # sample responses
        prompts = choose_prompts(config, task, index)
        rollout = roll_out(config, task, engine, prompts, ranks, state.versions_now())
        state.rest_sampler()
        clock.lap("rollout")

        # score them with the networks as they are before the update
        trained = as_trained(config, task, rollout)
        forward = score_rollout(state, trained, config, ranks)
        require_sampler_agrees(config, index, rollout, forward)
        rewards = compute_rewards(config, task, rollout, forward, coefficients.kl_coef, ranks)
        advantages = compute_advantages(config, rollout, forward, rewards)
        clock.lap("forward")

        # take the optimizer steps
        updates = tuple(update(state, trained, forward, advantages, config, ranks, clock))
        state.rest()
        ranks.require_same("weights after an update", (updates[-1].policy_digest, updates[-1].value_digest))
        clock.lap("digests")
        require_first_step_agrees(config, index, rollout, forward, updates[0])

        state.coefficients = next_coefficients(config, coefficients, forward, advantages, updates, len(rollout.lengths))
        state.iteration += 1
        clock.lap(OTHER)
        yield Iteration(index, evaluation, coefficients, rollout, forward, rewards, advantages, updates, clock.seconds)
