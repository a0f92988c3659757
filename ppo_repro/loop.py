"""The PPO loop. Read this first: each line of `ppo_iterations` is one stage, each stage one frozen type."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from ppo_repro.buffers import Advantages, ForwardPass, MinibatchUpdate, Rewards, Rollout
from ppo_repro.config.run import RunConfig
from ppo_repro.models.state import TrainState
from ppo_repro.ppo.controllers import Controls
from ppo_repro.ranks import Ranks
from ppo_repro.rollout.engine import Engine
from ppo_repro.stages.forward import score_rollout
from ppo_repro.stages.rollout import (
    Evaluation,
    Task,
    choose_prompts,
    compute_advantages,
    compute_rewards,
    evaluate,
    next_controls,
    roll_out,
)
from ppo_repro.stages.update import update


@dataclass(frozen=True)
class Iteration:
    """Everything one iteration produced."""

    index: int
    evaluation: Evaluation | None  # None where not due
    controls: Controls  # those in force during this iteration
    rollout: Rollout
    forward: ForwardPass
    rewards: Rewards
    advantages: Advantages
    updates: tuple[MinibatchUpdate, ...]
    seconds: dict[str, float]  # wall time by phase: rollout, forward, update, evaluation


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
        rewards = compute_rewards(config, task, rollout, forward, state.controls.kl_coef, ranks)
        advantages = compute_advantages(config, rollout, forward, rewards)
        clock.lap("forward")
        updates = tuple(update(state, rollout, forward, advantages, config, ranks))
        ranks.require_same("weights after an update", (updates[-1].policy_digest, updates[-1].value_digest))
        clock.lap("update")
        controls = state.controls
        state.controls = next_controls(config, controls, forward, advantages, updates, len(rollout.lengths))
        state.iteration += 1
        yield Iteration(index, evaluation, controls, rollout, forward, rewards, advantages, updates, clock.seconds)


class Clock:
    """Wall seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
