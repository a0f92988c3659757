"""The score of a response: rules, the user's Python functions, and the scores of a reward model."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ppo_repro.config.reward import CalledReward, ExactMatch, FormatReward, LengthReward, RewardConfig, RewardTerm
from ppo_repro.errors import UserError
from ppo_repro.output import shown
from ppo_repro.tasks.adapters import adapter
from ppo_repro.tasks.function_path import function_paths, parse
from ppo_repro.tasks.problems import Problem
from ppo_repro.tasks.user_functions import (
    FLOAT32_MAX,
    Texts,
    UserFunction,
    check_repeats,
    load,
    numbers,
)

# thoughts, then the answer, each in its own tags and nothing outside them. DeepSeek-AI, 2025, table 1.
_FORMAT = re.compile(
    r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>((?:(?!</?answer>).)*)</answer>\s*", re.S
)


@dataclass(frozen=True)
class Samples:
    """Responses with everything needed to judge them, one entry each."""

    keys: Sequence[str]  # of the prompts
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
    functions: tuple[UserFunction | None, ...]  # one entry per term
    potential: UserFunction | None


def matches(response: str, answer: str) -> bool:
    """Whether the response equals the answer; surrounding white space does not count."""
    return response.strip() == answer.strip()


def formatted_answer(response: str) -> str | None:
    """The text between the answer tags of `<think>..</think><answer>..</answer>`; None in any other form."""
    match = _FORMAT.fullmatch(response)
    return None if match is None else match.group(1)


def reward_files(config: RewardConfig) -> list[Path]:
    """The Python files of a reward; UserError as for `load_judge`."""
    return [parse(field, function)[0] for field, function in function_paths(config)]


def load_judge(config: RewardConfig) -> Judge:
    """The reward with the user's functions loaded; UserError names what is wrong with them."""
    functions = tuple(
        load(f"reward.terms.{i}.path", term.path, adapter(term)) if isinstance(term, CalledReward) else None
        for i, term in enumerate(config.terms)
    )
    return Judge(config, functions, None if config.potential is None else load("reward.potential", config.potential))


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
        columns = (samples.keys, samples.prompts, samples.responses, samples.answers)
        return numbers(function, [Texts(*row) for row in zip(*columns, strict=True)])
    return list(model_scores)


def _is_correct(config: RewardConfig, response: str, answer: str) -> bool:
    inner = formatted_answer(response) if any(isinstance(t, FormatReward) for t in config.terms) else None
    return matches(response if inner is None else inner, answer)


def _weighted(config: RewardConfig, values: Sequence[float]) -> float:
    """The weighted sum; infinite where float64 cannot hold it."""
    try:
        return math.fsum(term.weight * value for term, value in zip(config.terms, values, strict=True))
    except (OverflowError, ValueError):
        return math.inf


def judge_samples(judge: Judge, samples: Samples, model_scores: Sequence[float]) -> Judgement:
    """score = sum of weight times value over the reward terms; then the rules for responses without an end token.

    `model_scores` are the reward model's, one per response, or empty without one. A response is correct if it ended
    with an end token and equals the answer; where a format is rewarded, the text between its answer tags has to.
    UserError if a user's function raises or returns anything but a number, or a score is beyond float32.
    """
    config = judge.config
    columns = [_values(i, term, judge, samples, model_scores) for i, term in enumerate(config.terms)]
    term_values = [list(row) for row in zip(*columns, strict=True)]
    rows = zip(samples.responses, samples.answers, samples.finished, strict=True)
    correct = [done and _is_correct(config, response, answer) for response, answer, done in rows]
    scores = weighted_scores(config, term_values, samples.finished)
    for key, score in zip(samples.keys, scores, strict=True):
        if not abs(score) <= FLOAT32_MAX:
            raise UserError(
                f"reward: the score {score:g} for prompt key '{shown(key)}' is beyond float32 ({FLOAT32_MAX:.1e}); "
                "choose smaller weights in reward.terms"
            )
    return Judgement(scores, term_values, correct)


def weighted_scores(
    config: RewardConfig, term_values: Sequence[Sequence[float]], finished: Sequence[bool]
) -> list[float]:
    """Sum of weight times value over the reward terms, then the rules for responses that did not end by themselves."""
    scores = [_weighted(config, row) for row in term_values]
    for index, done in enumerate(finished):
        if not done and config.missing_eos_score is not None:
            scores[index] = config.missing_eos_score
        elif not done:
            scores[index] -= config.missing_eos_penalty
    return scores


def potentials(judge: Judge, texts: Sequence[Texts], char_starts: Sequence[Sequence[int]]) -> list[float]:
    """Phi before each token, response after response: the user's potential of the text up to there; 0 without one."""
    rows = [
        replace(of, response=of.response[:start])
        for of, starts in zip(texts, char_starts, strict=True)
        for start in starts
    ]
    return [0.0] * len(rows) if judge.potential is None else numbers(judge.potential, rows)


def check_functions(judge: Judge, problems: Sequence[Problem]) -> None:
    """UserError where a user's function gives two scores for one input: the answer, and nothing, to two prompts."""
    rows = [Texts(p.key, p.prompt, response, p.answer) for p in problems[:2] for response in (p.answer, "")]
    for function in (*judge.functions, judge.potential):
        if function is not None:
            check_repeats(function, rows)
