"""The PPO loop. Read this first: each line of `ppo_iterations` is one stage, each stage one frozen type."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ppo_repro.buffers import (
    Iteration,
)
from ppo_repro.config.run import RunConfig
from ppo_repro.models.state import TrainState
from ppo_repro.ranks import Ranks
from ppo_repro.rollout.engine import Engine
from ppo_repro.stages.advantages import compute_advantages
from ppo_repro.stages.coefficients import next_coefficients
from ppo_repro.stages.evaluation import evaluate
from ppo_repro.stages.forward import score_rollout
from ppo_repro.stages.prompts import Task, choose_prompts
from ppo_repro.stages.rewards import compute_rewards
from ppo_repro.stages.rollout import roll_out
from ppo_repro.stages.update import update


def ppo_iterations(
    config: RunConfig, task: Task, state: TrainState, engine: Engine, ranks: Ranks
) -> Iterator[Iteration]:
    """Run PPO; yields after every update. `state` is trained in place.

    Generating, scoring and updating are shared out by sequence; every rank sees the same whole of each stage.
    """
    while state.iteration < config.ppo.iterations:
        index, clock = state.iteration, Clock()
        due = index % config.evaluation.every == 0
        evaluation = evaluate(config, task, engine, ranks) if due else None
        clock.lap("evaluation")
        prompts = choose_prompts(config, task, index)
        rollout = roll_out(config, task, engine, prompts, ranks)
        clock.lap("rollout")
        forward = score_rollout(state, rollout, config, ranks)
        rewards = compute_rewards(config, task, rollout, forward, state.coefficients.kl_coef, ranks)
        advantages = compute_advantages(config, rollout, forward, rewards)
        clock.lap("forward")
        updates = tuple(update(state, rollout, forward, advantages, config, ranks))
        ranks.require_same("weights after an update", (updates[-1].policy_digest, updates[-1].value_digest))
        clock.lap("update")
        coefficients = state.coefficients
        state.coefficients = next_coefficients(config, coefficients, forward, advantages, updates, len(rollout.lengths))
        state.iteration += 1
        yield Iteration(index, evaluation, coefficients, rollout, forward, rewards, advantages, updates, clock.seconds)


class Clock:
    """Wall seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
