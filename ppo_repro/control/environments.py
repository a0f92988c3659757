"""Seeded copies of a Gymnasium environment, stepped side by side.

Every episode is reset with its own seed, a function of (run seed, copy, episode), so that a recorded episode can be
played again alone. The physics is the environment's own code: classic control takes sines and cosines from the C
library, whose last bits may differ between processors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo_repro.base import seeding
from ppo_repro.base.errors import UserError
from ppo_repro.base.output import type_and_message

try:
    import gymnasium
    from gymnasium.spaces import Box, Discrete
except ImportError as missing:
    raise UserError("gymnasium is not installed; pip install 'ppo_repro[control]'") from missing


FEW_INSIDE = 0.1  # share of an untrained policy's actions between the bounds


@dataclass(frozen=True)
class DiscreteActions:
    """Actions that are the whole numbers `start` to `start + count - 1`."""

    count: int
    start: int

    def taken(self, actions: NDArray[np.float32]) -> list[int]:
        """Convert action indices [E, 1] to the numbers that the environments take."""
        numbers: list[int] = (actions[:, 0].astype(np.int64) + self.start).tolist()
        return numbers


@dataclass(frozen=True)
class RealActions:
    """Actions that are vectors between two bounds."""

    low: NDArray[np.float32]  # [A]
    high: NDArray[np.float32]  # [A]

    def taken(self, actions: NDArray[np.float32]) -> NDArray[np.float32]:
        """Clip drawn actions [E, A] to the vectors [E, A] that the environments take."""
        return np.clip(actions, self.low, self.high)


Actions = DiscreteActions | RealActions


@dataclass(frozen=True)
class Transition:
    """One step of all E copies. `observations` follow the action, also the last observation of an ended episode."""

    observations: NDArray[np.float32]  # [E, O]
    rewards: NDArray[np.float32]  # [E]
    terminated: NDArray[np.bool_]  # [E], the episode ended by itself: nothing follows
    truncated: NDArray[np.bool_]  # [E], a time limit ended it: more would have followed
    episode_returns: NDArray[np.float64]  # [E], sum of the rewards of the episode so far


def _inside(bounds: NDArray[Any], outside: float) -> NDArray[np.float32]:
    """Round bounds [A] to float32, away from the end that is outside: an action at a bound is never beyond it."""
    with np.errstate(over="ignore"):
        nearest = bounds.astype(np.float32)
    is_beyond = nearest < bounds if outside < 0 else nearest > bounds
    inner = np.nextafter(nearest, np.float32(-outside))
    return np.where(is_beyond, inner, nearest)


@dataclass
class _Copy:
    """A copy of the environment, and its current episode."""

    env: Any
    episode: int = -1
    seed: int = 0
    steps: int = 0
    total: float = 0.0


class Environments:
    """The copies of one environment. `observations` [E, O] float32 are their current observations."""

    def __init__(self, identifier: str, count: int, *name: int | str) -> None:
        """Make `count` copies at the start of their first episodes, seeded by `name`.

        Raises UserError if the environment is not supported.
        """
        where = f"environment.id = {identifier!r}"
        try:
            envs = [gymnasium.make(identifier, disable_env_checker=True) for _ in range(count)]
        except (gymnasium.error.Error, ImportError) as error:
            raise UserError(f"{where}: gymnasium cannot make it ({' '.join(str(error).split())})") from error
        space, acted = envs[0].observation_space, envs[0].action_space
        if not isinstance(space, Box) or len(space.shape) != 1:
            raise UserError(f"{where}: its observations are {space}; must be a Box of one axis")
        if envs[0].spec is None or envs[0].spec.max_episode_steps is None:
            raise UserError(f"{where}: has no time limit; an evaluation might never end")
        self.actions: Actions
        if isinstance(acted, Discrete):
            self.actions = DiscreteActions(int(acted.n), int(acted.start))
        elif isinstance(acted, Box) and len(acted.shape) == 1:
            self.actions = RealActions(_inside(acted.low, -np.inf), _inside(acted.high, np.inf))
            if (crossed := np.flatnonzero(self.actions.low > self.actions.high)).size:
                i = crossed[0]
                raise UserError(
                    f"{where}: action {i} is {acted.low[i]} to {acted.high[i]}; must have a float32 number between its "
                    "bounds"
                )
        else:
            raise UserError(f"{where}: its actions are {acted}; must be Discrete or a Box of one axis")
        self.where, self.name, self.copies = where, name, [_Copy(env) for env in envs]
        self.observations = np.stack([self._reset(i) for i in range(count)]).astype(np.float32)

    def step(self, actions: NDArray[np.float32]) -> Transition:
        """Take actions [E, A]. A copy whose episode ended is reset to the start of its next episode."""
        count = len(self.copies)
        transition = Transition(
            observations=np.empty_like(self.observations),
            rewards=np.empty(count, np.float32),
            terminated=np.empty(count, bool),
            truncated=np.empty(count, bool),
            episode_returns=np.empty(count),
        )
        for i, (copy, action) in enumerate(zip(self.copies, self.actions.taken(actions), strict=True)):
            with self._named(i, "step"):
                observation, reward, terminated, truncated, _ = copy.env.step(action)
            copy.steps += 1
            self._require_numbers(i, f"the reward {reward}", reward, ())
            self._require_numbers(i, "the observation", observation, self.observations.shape[1:])
            paid = float(np.asarray(reward).reshape(()))  # some environments return an array of one number
            copy.total += paid
            transition.observations[i], transition.rewards[i] = observation, paid
            transition.terminated[i], transition.truncated[i] = terminated, truncated and not terminated
            transition.episode_returns[i] = copy.total
            if terminated or truncated:
                observation = self._reset(i)
            self.observations[i] = observation
        return transition

    def _reset(self, index: int) -> Any:
        copy = self.copies[index]
        copy.episode, copy.steps, copy.total = copy.episode + 1, 0, 0.0
        copy.seed = int(seeding.words(1, *self.name, index, copy.episode)[0] >> np.uint64(1))
        with self._named(index, "reset"):
            observation = copy.env.reset(seed=copy.seed)[0]
        self._require_numbers(index, "the observation", observation, copy.env.observation_space.shape)
        return observation

    @contextmanager
    def _named(self, index: int, method: str) -> Iterator[None]:
        """Raise UserError for what a method of an environment raises."""
        try:
            yield
        except Exception as error:
            raise self._wrong(index, f"{method} raised {type_and_message(error)}") from error

    def _require_numbers(self, index: int, what: str, values: Any, shape: tuple[int, ...]) -> None:
        """Raise UserError unless the values have this shape, or one number each, and are finite in float32."""
        try:
            with np.errstate(over="ignore"):
                numbers = np.asarray(values).astype(np.float32)
        except (TypeError, ValueError):
            raise self._wrong(index, f"{what} is no number") from None
        if numbers.shape != shape and (shape or numbers.size != 1):
            raise self._wrong(index, f"{what} has shape {numbers.shape} instead of {shape}")
        if len(wrong := np.flatnonzero(~np.isfinite(numbers))):
            raise self._wrong(index, f"{what} is not finite{f' at index {wrong[0]}' if np.ndim(values) else ''}")

    def _wrong(self, index: int, what: str) -> UserError:
        """Return an error that names copy, episode and step."""
        copy = self.copies[index]
        return UserError(
            f"{self.where}: {what} (copy {index}, episode {copy.episode} with seed {copy.seed}, step {copy.steps}); "
            "correct the environment"
        )

    def warning(self) -> str | None:
        """Return a sentence on actions that an untrained policy mostly clips; None if there are none."""
        if not isinstance(self.actions, RealActions):
            return None
        for i, (low, high) in enumerate(zip(self.actions.low.tolist(), self.actions.high.tolist(), strict=True)):
            inside = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
            if low > 0 or high < 0 or inside < FEW_INSIDE:
                ends = f"{low:g}" if low > 0 else f"{high:g}" if high < 0 else f"{low:g} or {high:g}"
                return (
                    f"{self.where}: action {i} is {low:g} to {high:g}; an untrained policy draws from mean 0 and "
                    f"deviation 1, so most of its actions are clipped to {ends}, and it cannot "
                    "learn from them; rescale the actions to -1 to 1 (gymnasium.wrappers.RescaleAction)"
                )
        return None

    def close(self) -> None:
        for copy in self.copies:
            copy.env.close()
