"""Control runs, for the runner.

There are no checkpoints: the state inside an environment cannot be saved in general. A run that was ended is
computed again from its beginning, which takes minutes, and compared as far as it is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ppo_repro.clock import Clock
from ppo_repro.config.files import CONTROL, Kind
from ppo_repro.config.run import ControlConfig
from ppo_repro.control.loop import ControlIteration, ControlState, control_iterations, prepare
from ppo_repro.control.stages import evaluate
from ppo_repro.control.tables import finished_returns, iteration_tables
from ppo_repro.numerics.optimizer import weights_digest
from ppo_repro.ranks import ALONE, Ranks
from ppo_repro.runs.kind import Final, Start, Store, Tables
from ppo_repro.watcher import Watcher

LAST = 100  # training episodes in the mean that CleanRL reports


@dataclass(frozen=True)
class ControlExecution:
    """A control run that is prepared, and the returns of its episodes so far, in the order in which they ended."""

    config: ControlConfig
    state: ControlState
    initial_digest: str
    returns: list[float] = field(default_factory=list)
    store: ClassVar[Store] = Store()
    notes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def iterations(self) -> Iterator[ControlIteration]:
        for item in control_iterations(self.config, self.state):
            self.returns.extend(finished_returns(item))
            yield item

    def preparation_tables(self) -> Tables:
        return {}

    def tables(self, item: ControlIteration) -> Tables:
        return iteration_tables(item, self.config.records.level)

    def progress(self, item: ControlIteration) -> str:
        return f"return {self._last_mean():.2f}  KL {item.updates[-1].approx_kl:.4f}"

    def _last_mean(self) -> float:
        last = self.returns[-LAST:]
        return math.fsum(last) / len(last) if last else math.nan

    def ending(self, clock: Clock) -> tuple[Final, Tables]:
        agent = self.state.agent
        eval_return = evaluate(self.config, agent)
        clock.lap("evaluation")
        policy_digest = weights_digest(agent.policy_parameters())
        value_digest = weights_digest(agent.value_parameters())
        clock.lap("digests")
        results: Final = {
            "episodes": len(self.returns),
            "last_100_return": self._last_mean(),
            "eval_return": eval_return,
            "initial_policy_digest": self.initial_digest,
            "policy_digest": policy_digest,
            "value_digest": value_digest,
        }
        return results, {}


@dataclass(frozen=True)
class ControlKind:
    """Control runs: one process, no input files."""

    watcher: Watcher
    ranks: ClassVar[Ranks] = ALONE
    name: ClassVar[Kind] = CONTROL
    changeable: ClassVar[Sequence[str]] = ("layout", "records")

    @contextmanager
    def open(
        self, config: ControlConfig, run_dir: Path | None, start: Start | None = None
    ) -> Iterator[ControlExecution]:
        state = prepare(config)
        try:
            yield ControlExecution(config, state, weights_digest(state.agent.policy_parameters()))
        finally:
            state.environments.close()
