"""The score of a response: rules, the user's Python functions, and the scores of a reward model."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

from ppo_repro.config.reward import ExactMatch, FormatReward, FunctionReward, LengthReward, RewardConfig, RewardTerm
from ppo_repro.errors import UserError

UserReward = Callable[[str, str, str], float]

# thoughts, then the answer, each in its own tags and nothing outside them. DeepSeek-AI, 2025, table 1.
_FORMAT = re.compile(
    r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>((?:(?!</?answer>).)*)</answer>\s*", re.S
)


@dataclass(frozen=True)
class Samples:
    """Responses with everything needed to judge them, one entry each."""

    prompts: Sequence[str]
    responses: Sequence[str]
    answers: Sequence[str]
    finished: Sequence[bool]  # ended with an end token
    lengths: Sequence[int]  # tokens, end token included


@dataclass(frozen=True)
class Judgement:
    """The verdict on some responses, one entry each."""

    scores: list[float]
    term_values: list[list[float]]  # the unweighted value of each reward term
    correct: list[bool]


@dataclass(frozen=True)
class Judge:
    """The reward of a configuration with its functions loaded."""

    config: RewardConfig
    functions: tuple[UserReward | None, ...]  # one entry per term
    potential: UserReward | None


def matches(response: str, answer: str) -> bool:
    """Whether the response equals the answer; surrounding white space does not count."""
    return response.strip() == answer.strip()


def formatted_answer(response: str) -> str | None:
    """The text between the answer tags of `<think>..</think><answer>..</answer>`; None in any other form."""
    match = _FORMAT.fullmatch(response)
    return None if match is None else match.group(1)


def _parse(field: str, function: str) -> tuple[Path, str]:
    """File and function of `FILE.py:FUNCTION`; UserError if it has another form or there is no such file."""
    file, colon, name = function.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise UserError(f"{field} = {function!r}: must be FILE.py:FUNCTION")
    if not Path(file).is_file():
        raise UserError(f"{field} = {function!r}: there is no file {file}")
    return Path(file), name


def _functions(config: RewardConfig) -> list[tuple[str, str]]:
    """(field, FILE.py:FUNCTION) of every function in a reward."""
    terms = [(f"reward.terms.{i}.path", t.path) for i, t in enumerate(config.terms) if isinstance(t, FunctionReward)]
    return terms if config.potential is None else [*terms, ("reward.potential", config.potential)]


def reward_files(config: RewardConfig) -> list[Path]:
    """The Python files of a reward; UserError as for `load_judge`."""
    return [_parse(field, function)[0] for field, function in _functions(config)]


def _load(field: str, function: str) -> UserReward:
    file, name = _parse(field, function)
    module_name = "ppo_repro_user_" + re.sub(r"\W", "_", field)
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{field} = {function!r}: {file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses in the user's file look up their module here
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # any error of the user's file is reported to the user
        raise UserError(f"{field}: {file} fails to load ({type(error).__name__}: {error})") from error
    loaded = getattr(module, name, None)
    if not callable(loaded):
        raise UserError(f"{field} = {function!r}: {file} has no function {name}")
    return loaded


def load_judge(config: RewardConfig) -> Judge:
    """The reward with the user's functions loaded; UserError names what is wrong with them."""
    loaded = {field: _load(field, function) for field, function in _functions(config)}
    functions = tuple(loaded.get(f"reward.terms.{i}.path") for i in range(len(config.terms)))
    return Judge(config, functions, loaded.get("reward.potential"))


def _is_finite_number(value: object) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int beyond the range of float
        return False


def _ask(field: str, function: UserReward, prompt: str, response: str, answer: str) -> float:
    try:
        value = function(prompt, response, answer)
    except Exception as error:  # any error of the user's function is reported to the user
        raise UserError(f"{field}: the function raised {type(error).__name__}: {error}; prompt {prompt!r}") from error
    if not _is_finite_number(value):
        raise UserError(f"{field}: the function returned {value!r} for prompt {prompt!r}; must be a finite number")
    return float(value)


def _format_value(config: FormatReward, response: str, answer: str) -> float:
    inner = formatted_answer(response)
    return 0.0 if inner is None else 1.0 + config.answer_weight * matches(inner, answer)


def _values(index: int, term: RewardTerm, judge: Judge, samples: Samples, model_scores: Sequence[float]) -> list[float]:
    """The unweighted value of one reward term for every response."""
    function = judge.functions[index]
    if isinstance(term, ExactMatch):
        rows = zip(samples.responses, samples.answers, samples.finished, strict=True)
        return [float(done and matches(response, answer)) for response, answer, done in rows]
    if isinstance(term, FormatReward):
        return [_format_value(term, r, a) for r, a in zip(samples.responses, samples.answers, strict=True)]
    if isinstance(term, LengthReward):
        return [-abs(length - term.target) / term.target for length in samples.lengths]
    if function is not None:
        rows_of_texts = zip(samples.prompts, samples.responses, samples.answers, strict=True)
        return [_ask(f"reward.terms.{index}", function, *texts) for texts in rows_of_texts]
    return list(model_scores)


def _is_correct(config: RewardConfig, response: str, answer: str) -> bool:
    inner = formatted_answer(response) if any(isinstance(t, FormatReward) for t in config.terms) else None
    return matches(response if inner is None else inner, answer)


def judge_samples(judge: Judge, samples: Samples, model_scores: Sequence[float]) -> Judgement:
    """score = sum of weight times value over the reward terms; then the rules for responses without an end token.

    `model_scores` are the reward model's, one per response, or empty without one. A response is correct if it ended
    with an end token and equals the answer; where a format is rewarded, the text between its answer tags has to.
    UserError if a user's function raises or returns anything but a finite number.
    """
    config = judge.config
    columns = [_values(i, term, judge, samples, model_scores) for i, term in enumerate(config.terms)]
    term_values = [list(row) for row in zip(*columns, strict=True)]
    rows = zip(samples.responses, samples.answers, samples.finished, strict=True)
    correct = [done and _is_correct(config, response, answer) for response, answer, done in rows]
    return Judgement(weighted_scores(config, term_values, samples.finished), term_values, correct)


def weighted_scores(
    config: RewardConfig, term_values: Sequence[Sequence[float]], finished: Sequence[bool]
) -> list[float]:
    """Sum of weight times value over the reward terms, then the rules for responses that did not end by themselves."""
    scores = [math.fsum(t.weight * v for t, v in zip(config.terms, row, strict=True)) for row in term_values]
    for index, done in enumerate(finished):
        if not done and config.missing_eos_score is not None:
            scores[index] = config.missing_eos_score
        elif not done:
            scores[index] -= config.missing_eos_penalty
    return scores


def potentials(judge: Judge, prompt: str, response: str, answer: str, char_starts: Sequence[int]) -> list[float]:
    """Phi before each token: the user's potential of the response text up to there; 0 without a potential."""
    if judge.potential is None:
        return [0.0] * len(char_starts)
    return [_ask("reward.potential", judge.potential, prompt, response[:start], answer) for start in char_starts]
