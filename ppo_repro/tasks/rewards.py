"""The score of a response: rules, the user's Python functions, and the scores of a reward model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ppo_repro.config.reward import (
    CalledReward,
    ExactMatch,
    FormatReward,
    LengthReward,
    RewardConfig,
    RewardTerm,
    Verifier,
)
from ppo_repro.config.tasks import AnswerExtraction
from ppo_repro.errors import UserError
from ppo_repro.output import shown
from ppo_repro.tasks.adapters import adapter
from ppo_repro.tasks.answers import extracted, is_answer, matches
from ppo_repro.tasks.function_path import function_paths, parse
from ppo_repro.tasks.problems import Problem
from ppo_repro.tasks.python_task import PythonFile, scores
from ppo_repro.tasks.reasoning_gym_task import GymVerifier, gym_scores
from ppo_repro.tasks.sources import Source
from ppo_repro.tasks.transcripts import make_transcript
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
    lengths: Sequence[int]  # sampled tokens, end token included
    turns: Sequence[Sequence[str]] | None = None  # the text of every turn; None where each is one response


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
    extraction: AnswerExtraction = "exact"
    verifier: GymVerifier | PythonFile | None = None  # the task's own
    fields: Mapping[str, str] = field(default_factory=dict)  # the other fields of a prompt by its key, JSON objects

    def fields_of(self, key: str) -> str:
        return self.fields.get(key, "{}")


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
    return Judge(config, functions)


def for_source(judge: Judge, source: Source, extraction: AnswerExtraction) -> Judge:
    """The judge with what a task brings; UserError where a term needs a verifier that its file does not have."""
    verifier = source.verifier
    if isinstance(verifier, PythonFile) and verifier.score is None:
        if any(isinstance(term, Verifier) for term in judge.config.terms):
            raise UserError(
                f"task.path: {verifier.file} has no function score, which the reward term of kind verifier calls; "
                "add it, or give other reward.terms"
            )
        verifier = None
    problems = (*source.problems.train, *source.problems.held_out)
    fields = {problem.key: problem.fields for problem in problems if problem.fields != "{}"}
    return replace(judge, extraction=extraction, verifier=verifier, fields=fields)


def _verified(judge: Judge, samples: Samples) -> list[float]:
    """What the task's verifier says of every response."""
    verifier = judge.verifier
    if isinstance(verifier, GymVerifier):
        return gym_scores(verifier, samples.keys, [extracted(r, judge.extraction) for r in samples.responses])
    assert verifier is not None
    turns = [(response,) for response in samples.responses] if samples.turns is None else samples.turns
    rows = zip(samples.keys, samples.prompts, samples.answers, turns, strict=True)
    transcripts = [make_transcript(key, prompt, a, judge.fields_of(key), texts) for key, prompt, a, texts in rows]
    return scores(verifier, transcripts)


def _format_value(response: str, answer: str) -> float:
    inner = formatted_answer(response)
    return 0.0 if inner is None else 1.0 + matches(inner, answer)


def _values(index: int, term: RewardTerm, judge: Judge, samples: Samples, model_scores: Sequence[float]) -> list[float]:
    """The unweighted value of one reward term for every response."""
    function = judge.functions[index]
    if isinstance(term, ExactMatch):
        rows = zip(samples.responses, samples.answers, samples.finished, strict=True)
        return [float(done and is_answer(response, answer, judge.extraction)) for response, answer, done in rows]
    if isinstance(term, FormatReward):
        return [_format_value(r, a) for r, a in zip(samples.responses, samples.answers, strict=True)]
    if isinstance(term, LengthReward):
        return [-abs(length - term.target) / term.target for length in samples.lengths]
    if isinstance(term, Verifier):
        return _verified(judge, samples)
    if function is not None:
        columns = (samples.keys, samples.prompts, samples.responses, samples.answers)
        rows_of = zip(*columns, strict=True)
        return numbers(function, [Texts(*row, judge.fields_of(row[0])) for row in rows_of])
    return list(model_scores)


def _correct(judge: Judge, samples: Samples, columns: Sequence[Sequence[float]]) -> list[bool]:
    """Whether each response is correct, finished or not: by the verifier where it is asked, else by its answer."""
    terms = judge.config.terms
    verified = next((values for term, values in zip(terms, columns, strict=True) if isinstance(term, Verifier)), None)
    if verified is not None:
        return [value >= 1.0 for value in verified]
    has_format = any(isinstance(term, FormatReward) for term in terms)
    return [
        _is_correct(judge, has_format, response, answer)
        for response, answer in zip(samples.responses, samples.answers, strict=True)
    ]


def _is_correct(judge: Judge, has_format: bool, response: str, answer: str) -> bool:
    inner = formatted_answer(response) if has_format else None
    return is_answer(response, answer, judge.extraction) if inner is None else matches(inner, answer)


def _weighted(config: RewardConfig, values: Sequence[float]) -> float:
    """The weighted sum; infinite where float64 cannot hold it."""
    try:
        return math.fsum(term.weight * value for term, value in zip(config.terms, values, strict=True))
    except (OverflowError, ValueError):
        return math.inf


def judge_samples(judge: Judge, samples: Samples, model_scores: Sequence[float]) -> Judgement:
    """score = sum of weight times value over the reward terms; then the rules for responses without an end token.

    `model_scores` are the reward model's, one per response, or empty without one. A response is correct if it ended
    by itself with the answer: where the task's verifier is asked, if that gives 1 or more; where a format is rewarded,
    if the text between its answer tags is the answer; else if what the task extracts is.
    UserError if a user's function raises or returns anything but a number, or a score is beyond float32.
    """
    config = judge.config
    columns = [_values(i, term, judge, samples, model_scores) for i, term in enumerate(config.terms)]
    term_values = [list(row) for row in zip(*columns, strict=True)]
    answered = _correct(judge, samples, columns)
    correct = [done and right for done, right in zip(samples.finished, answered, strict=True)]
    weighted = weighted_scores(config, term_values, samples.finished)
    for key, score in zip(samples.keys, weighted, strict=True):
        if not abs(score) <= FLOAT32_MAX:
            raise UserError(
                f"reward: the score {score:g} for prompt key '{shown(key)}' is beyond float32 ({FLOAT32_MAX:.1e}); "
                "choose smaller weights in reward.terms"
            )
    return Judgement(weighted, term_values, correct)


def weighted_scores(
    config: RewardConfig, term_values: Sequence[Sequence[float]], finished: Sequence[bool]
) -> list[float]:
    """Sum of weight times value over the reward terms, then the rules for responses that did not end by themselves."""
    scores = [_weighted(config, row) for row in term_values]
    for index, done in enumerate(finished):
        if not done:
            scores[index] -= config.missing_eos_penalty
    return scores


def check_functions(judge: Judge, problems: Sequence[Problem]) -> None:
    """UserError where a user's function gives two scores for one input: the answer, and nothing, to two prompts."""
    rows = [Texts(p.key, p.prompt, response, p.answer, p.fields) for p in problems[:2] for response in (p.answer, "")]
    for function in judge.functions:
        if function is not None:
            check_repeats(function, rows)
