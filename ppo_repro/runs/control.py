"""Execute control runs, and make the columns of their five tables.

There are no checkpoints, because in general the state inside an environment cannot be saved. A resumed run is computed
again from its beginning, which takes minutes, and compared with its records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ppo_repro.base.clock import Clock, moment
from ppo_repro.config.control import ControlConfig
from ppo_repro.config.kinds import CONTROL
from ppo_repro.control.buffers import ControlIteration
from ppo_repro.control.loop import ControlState, control_iterations, evaluate, prepare
from ppo_repro.numerics.sums import mean_of, run_sums
from ppo_repro.numerics.weights import weights_digest
from ppo_repro.ppo.advantages import explained_variance
from ppo_repro.ppo.objectives import flag_names, removes_gradient
from ppo_repro.records import schema
from ppo_repro.records.columns import (
    Columns,
    Stages,
    cells_of,
    count_agreement,
    fields_of,
    int32,
    rows_of,
    tables_at,
    tokens_of,
)
from ppo_repro.records.manifest import FinalResults
from ppo_repro.runs.kind import Execution, RunKind, Tables
from ppo_repro.runs.starting_point import Start

LAST = 100  # training episodes in the mean that CleanRL reports


@dataclass(frozen=True)
class ControlExecution(Execution[ControlIteration]):
    """A prepared control run, and the returns of its episodes so far, in the order in which they ended."""

    config: ControlConfig
    state: ControlState
    initial_digest: str
    returns: list[float] = field(default_factory=list)
    checkpoints = None

    def iterations(self) -> Iterator[ControlIteration]:
        for item in control_iterations(self.config, self.state):
            self.returns.extend(item.finished_returns())
            yield item

    def tables(self, item: ControlIteration) -> Tables:
        columns = {
            "sequences": _sequences(item),
            "tokens": _tokens(item),
            "updates": _updates(item),
            "steps": _steps(item),
            "iterations": _iteration(item),
        }
        return tables_at(item.index, schema.CONTROL_TABLES, columns, self.config.records.level)

    def progress(self, item: ControlIteration) -> str:
        return f"return {self._last_mean():.2f}  approx_kl {item.updates[-1].approx_kl:.4f}"

    def _last_mean(self) -> float:
        last = self.returns[-LAST:]
        return math.fsum(last) / len(last) if last else math.nan

    def ending(self, clock: Clock) -> tuple[FinalResults, Tables]:
        agent = self.state.agent
        eval_return = evaluate(self.config, agent)
        clock.lap("evaluation")
        policy_digest = weights_digest(agent.policy_parameters())
        value_digest = weights_digest(agent.value_parameters())
        clock.lap("digests")
        results: FinalResults = {
            "episodes": len(self.returns),
            "last_100_return": self._last_mean(),
            "eval_return": eval_return,
            "initial_policy_digest": self.initial_digest,
            "policy_digest": policy_digest,
            "value_digest": value_digest,
        }
        return results, {}


@dataclass(frozen=True)
class ControlKind(RunKind[ControlConfig, ControlIteration]):
    """Control runs, which have one process and no input files."""

    name = CONTROL
    changeable = ("layout", "records")

    @contextmanager
    def open(
        self, config: ControlConfig, run_dir: Path | None, start: Start | None = None
    ) -> Iterator[ControlExecution]:
        state = prepare(config)
        if warning := state.environments.warning():
            self.watcher.warning(warning)
        try:
            yield ControlExecution(config, state, weights_digest(state.agent.policy_parameters()))
        finally:
            state.environments.close()


def _sequences(item: ControlIteration) -> Columns:
    rollout = item.rollout
    ends = zip(rollout.end_reason, rollout.episode_return, strict=True)
    return {
        "sequence": range(len(rollout.lengths)),
        **fields_of(schema.CONTROL_SEQUENCES, {"rollout": rollout, "forward": item.forward}),
        "fragment_length": int32(rollout.lengths),
        "reward_sum": run_sums(rollout.rewards, rollout.lengths).numpy(),
        "episode_return": [None if reason == "cut" else total for reason, total in ends],
    }


def _tokens(item: ControlIteration) -> Columns:
    sequence, position = cells_of(item.rollout.lengths)
    stages: Stages = {"rollout": item.rollout, "forward": item.forward, "advantages": item.advantages}
    return {"sequence": sequence, "position": position, **fields_of(schema.CONTROL_TOKENS, stages)}


def _updates(item: ControlIteration) -> Columns:
    sequence, position = cells_of(item.rollout.lengths)
    tokens = torch.cat([u.tokens for u in item.updates]).numpy()
    return {
        **tokens_of(schema.CONTROL_UPDATES, "step", item.updates, [len(u.tokens) for u in item.updates]),
        "sequence": sequence[tokens],
        "position": position[tokens],
        "clip_flag": flag_names(torch.cat([u.clip_flags for u in item.updates])),
    }


def _steps(item: ControlIteration) -> Columns:
    return {
        **rows_of(schema.CONTROL_STEPS, "step", item.updates),
        "tokens": int32([len(u.tokens) for u in item.updates]),
        "entropy": [mean_of(u.new_entropies) for u in item.updates],
        "clip_fraction": [mean_of(removes_gradient(u.clip_flags)) for u in item.updates],
        "value_clip_fraction": [mean_of(u.value_clipped) for u in item.updates],
    }


def _iteration(item: ControlIteration) -> Columns:
    rollout, forward, first = item.rollout, item.forward, item.updates[0]
    ended = item.finished_returns()
    row: Columns = {
        "sequences": len(rollout.lengths),
        "tokens": len(rollout.rewards),
        "episodes": len(ended),
        "episode_return_mean": math.fsum(ended) / len(ended) if ended else None,
        "entropy": mean_of(forward.entropies),
        "explained_variance": explained_variance(forward.values, item.advantages.returns),
        **count_agreement(
            rollout.rollout_logprobs, forward.old_logprobs, first.ratios, forward.values[first.tokens], first.new_values
        ),
        "eval_return": item.eval_return,
        **{f"seconds_{phase}": seconds for phase, seconds in item.seconds.items()},
        "ended_at": moment(),
    }
    return {name: [value] for name, value in row.items()}
