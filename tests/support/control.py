"""A small control run, and an environment whose every step is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from ppo_repro.base.watcher import Silent, Watcher
from ppo_repro.config.control import ControlConfig
from ppo_repro.config.files import read_tree, validated
from ppo_repro.runs import rerun as again
from ppo_repro.runs import resume as resumer
from ppo_repro.runs import run as runner
from ppo_repro.runs.control import ControlKind
from tests.support.paths import SMALL_CONTROL

SILENT = Silent()


class Corridor(gymnasium.Env[Any, Any]):
    """The observation is (steps, copy's offset); an episode ends by itself after `length` steps, if it gets there."""

    def __init__(self, length: int) -> None:
        self.observation_space = Box(-1e6, 1e6, (2,), np.float32)
        self.action_space = Discrete(2, start=3)
        self.length, self.steps, self.offset = length, 0, 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.offset = 0, float(self.np_random.integers(0, 1000))
        return self._observation(), {}

    def _observation(self) -> Any:
        return np.array([self.steps, self.offset], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action in (3, 4), action
        self.steps += 1
        return self._observation(), float(self.steps), self.steps >= self.length, False, {}


class Ragged(Corridor):
    """A corridor whose length, 1 to 9, depends on the seed of the episode."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        found = super().reset(seed=seed)
        self.length = 1 + int(self.offset) % 9
        return found


gymnasium.register("tests/Ragged-v0", Ragged, max_episode_steps=100, kwargs={"length": 1})
for _name, _length, _limit in (
    ("Ending-v0", 3, 100),
    ("Limited-v0", 100, 3),
    ("Both-v0", 3, 3),
    ("Endless-v0", 9, None),
):
    gymnasium.register(f"tests/{_name}", Corridor, max_episode_steps=_limit, kwargs={"length": _length})


def run(config: ControlConfig, out: Path, watcher: Watcher = SILENT) -> tuple[Path, dict[str, float]]:
    return runner.run(ControlKind(watcher), config, out)


def rerun(run_dir: Path, overrides: Sequence[str] = ()) -> again.Rerun:
    return again.rerun(ControlKind(SILENT), run_dir, overrides)


def resume(run_dir: Path, overrides: Sequence[str] = ()) -> resumer.Resumed:
    return resumer.resume(ControlKind(SILENT), run_dir, overrides)


def small_control(*overrides: str) -> ControlConfig:
    """`small_control.yaml` with some fields changed."""
    return validated(ControlConfig, read_tree(SMALL_CONTROL, overrides), str(SMALL_CONTROL))
