"""What an environment gets wrong is one line with copy, episode, step and place, before it reaches a network."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box

from ppo_repro.base.errors import UserError
from ppo_repro.base.watcher import Silent
from ppo_repro.control.environments import Environments
from tests.support.control import run, small_control
from tests.support.float32 import LARGEST


class Faulty(gymnasium.Env[Any, Any]):
    """The fault comes in the second step of every episode of three steps, or at the reset."""

    def __init__(self, fault: str = "", low: float = -1.0, high: float = 1.0, dtype: Any = np.float32) -> None:
        self.observation_space = Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = Box(low, high, (2,), dtype)
        self.fault, self.steps = fault, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        if self.fault == "raise":
            raise RuntimeError("no display")
        return np.array([0, 0, math.nan if self.fault == "reset" else 0], np.float64), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        now = self.fault if self.steps == 2 else ""
        if now == "four":
            return np.zeros(3), 1.0, False, {}  # type: ignore[return-value]  # as gym had it
        observation = np.array([0, {"nan": math.nan, "huge": 1e39}.get(now, 0), 0], np.float64)
        rewards: dict[str, Any] = {"reward": math.inf, "pair": np.ones(2), "text": "good", "list": [1.0]}
        observation = observation[:1] if now == "short" else observation
        return observation, rewards.get(now, 1.0), self.steps == 3, False, {}


gymnasium.register("tests/Faulty-v0", Faulty, max_episode_steps=9)
for _fault in ("reset", "nan", "huge", "reward", "pair", "text", "short", "four", "raise", "list"):
    gymnasium.register(f"tests/Faulty-{_fault}-v0", Faulty, max_episode_steps=9, kwargs={"fault": _fault})
BOUNDS = [(-0.1, 0.1), (0.7, 0.9), (-0.9, -0.7), (-1.0, 1.0), (-math.inf, 1e300)]
_NAMED = {"Point": (0.1, 0.1), "High": (10.0, 12.0), "Narrow": (0.0, 0.01), "Low": (-3.0, -2.0)}
for _name, (_low, _high) in [*enumerate(BOUNDS), *_NAMED.items()]:
    _bounds = {"low": _low, "high": _high, "dtype": np.float64}
    gymnasium.register(f"tests/Bounds{_name}-v0", Faulty, max_episode_steps=9, kwargs=_bounds)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("reset", "the observation is not finite at index 2 (copy 0, episode 0 with seed {}, step 0)"),
        ("raise", "reset raised RuntimeError: no display (copy 0, episode 0 with seed {}, step 0)"),
        ("nan", "the observation is not finite at index 1 (copy 0, episode 0 with seed {}, step 2)"),
        ("huge", "the observation is not finite at index 1 (copy 0, episode 0 with seed {}, step 2)"),
        ("reward", "the reward inf is not finite (copy 0, episode 0 with seed {}, step 2)"),
        ("pair", "the reward [1. 1.] has shape (2,) instead of () (copy 0, episode 0 with seed {}, step 2)"),
        ("text", "the reward good is no number (copy 0, episode 0 with seed {}, step 2)"),
        ("short", "the observation has shape (1,) instead of (3,) (copy 0, episode 0 with seed {}, step 2)"),
        (
            "four",
            "step raised ValueError: not enough values to unpack (expected 5, got 4) (copy 0, episode 0 with seed {}, "
            "step 1)",
        ),
    ],
)
def test_a_number_that_is_not_finite_is_named_with_its_place(fault: str, said: str) -> None:
    right = Environments("tests/Faulty-v0", 2, "x")
    where = said.format(right.copies[0].seed)
    actions = np.zeros((2, 2), np.float32)
    with pytest.raises(UserError) as error:
        environments = Environments(f"tests/Faulty-{fault}-v0", 2, "x")
        for _ in range(2):
            environments.step(actions)
    assert str(error.value) == f"environment.id = 'tests/Faulty-{fault}-v0': {where}; correct the environment"
    for _ in range(9):  # control
        right.step(actions)


def test_a_reward_may_be_a_list_of_one_number() -> None:
    listed, right = (Environments(f"tests/Faulty-{name}v0", 2, "x") for name in ("list-", ""))
    for _ in range(3):
        actions = np.zeros((2, 2), np.float32)
        assert listed.step(actions).rewards.tolist() == right.step(actions).rewards.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_no_action_is_beyond_bounds_that_float32_does_not_hold(low: float, high: float) -> None:
    environments = Environments(f"tests/Bounds{BOUNDS.index((low, high))}-v0", 1, "x")
    for drawn, bound in ((-math.inf, low), (math.inf, high)):
        taken = environments.actions.taken(np.full((1, 2), drawn, np.float32))
        assert low <= float(taken[0][0]) <= high
        nearest = LARGEST if bound == 1e300 else bound
        assert taken[0][0] == pytest.approx(nearest, rel=2.0**-23)


def test_bounds_without_a_float32_number_between_them_are_refused() -> None:
    with pytest.raises(UserError, match=r"action 0 is 0.1 to 0.1; must have a float32 number between its bounds"):
        Environments("tests/BoundsPoint-v0", 1, "x")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("High", "action 0 is 10 to 12; an untrained policy draws from mean 0 and deviation 1, so most of its actions"),
        ("Narrow", "so most of its actions are clipped to 0 or 0.01, and it cannot learn from them; rescale the"),
        ("Low", "are clipped to -2, and it cannot learn from them; rescale the actions to -1 to 1"),
    ],
)
def test_actions_that_no_untrained_policy_takes_are_named_at_the_start(name: str, said: str, tmp_path: Path) -> None:
    class Heard(Silent):
        def warning(self, text: str) -> None:
            heard.append(text)

    heard: list[str] = []
    small = ("environment.num_envs=2", "environment.steps_per_env=4", "ppo.minibatch_size=8", "ppo.iterations=1")
    run(small_control(f"environment.id=tests/Bounds{name}-v0", *small), tmp_path, Heard())
    assert len([line for line in heard if said in line]) == 1
    assert Environments("tests/Faulty-v0", 1, "x").warning() is None
