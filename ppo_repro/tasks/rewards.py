"""Verifiers: from a response to a score."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path

from ppo_repro.errors import UserError

UserReward = Callable[[str, str, str], float]


def matches(response: str, answer: str) -> bool:
    """Whether the response says the answer; surrounding white space does not count."""
    return response.strip() == answer.strip()


def _parse(reward: str) -> tuple[Path, str]:
    """File and function of `FILE.py:FUNCTION`; UserError if it is not of that form or there is no such file."""
    file, colon, name = reward.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise UserError(f"task.reward = {reward!r}: must be exact_match or FILE.py:FUNCTION")
    if not Path(file).is_file():
        raise UserError(f"task.reward = {reward!r}: there is no file {file}")
    return Path(file), name


def reward_file(reward: str) -> Path | None:
    """The Python file of a `FILE.py:FUNCTION` reward, None for `exact_match`; UserError as for `load_reward`."""
    return None if reward == "exact_match" else _parse(reward)[0]


def load_reward(reward: str) -> UserReward | None:
    """The user's reward function, or None for `exact_match`. UserError names what is wrong with it."""
    if reward == "exact_match":
        return None
    file, name = _parse(reward)
    spec = importlib.util.spec_from_file_location("ppo_repro_user_reward", file)
    if spec is None or spec.loader is None:
        raise UserError(f"task.reward = {reward!r}: {file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses in the user's file look their module up here
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file raises is the user's to see
        raise UserError(f"task.reward: {file} fails to load ({type(error).__name__}: {error})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"task.reward = {reward!r}: {file} has no function {name}")
    return function


def _is_finite_number(value: object) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int beyond the range of float
        return False


def score(
    reward: UserReward | None,
    prompts: Sequence[str],
    responses: Sequence[str],
    answers: Sequence[str],
    finished: Sequence[bool],
) -> tuple[list[float], list[bool]]:
    """Scores and correctness of some responses.

    A response is correct if it matches the answer and ended by itself. `exact_match` scores 1 for correct
    and 0 otherwise. UserError if a user's function raises or returns anything but a finite number.
    """
    correct = [done and matches(r, a) for r, a, done in zip(responses, answers, finished, strict=True)]
    if reward is None:
        return [float(c) for c in correct], correct
    scores = []
    for prompt, response, answer in zip(prompts, responses, answers, strict=True):
        try:
            value = reward(prompt, response, answer)
        except Exception as error:  # whatever the user's function raises is the user's to see
            raise UserError(
                f"task.reward: the function raised {type(error).__name__}: {error}; prompt {prompt!r}"
            ) from error
        if not _is_finite_number(value):
            raise UserError(
                f"task.reward: the function returned {value!r} for prompt {prompt!r}; must be a finite number"
            )
        scores.append(float(value))
    return scores, correct
