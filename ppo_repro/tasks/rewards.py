"""The score of a response: rules, the user's Python functions, and the scores of a reward model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
from ppo_repro.tasks.answers import extracted, is_answer, matches
from ppo_repro.tasks.child import FLOAT32_MAX
from ppo_repro.tasks.problems import Problem
from ppo_repro.tasks.sources import GymVerifier, PythonFile, Source, transcript_of
from ppo_repro.tasks.user_code import Texts, UserFunction, UserProcess, check_repeats, load_function, numbers

TAGS = ("<think>", "</think>", "<answer>", "</answer>")

# thoughts, then the answer, each in its own tags and nothing outside them. DeepSeek-AI, 2025, table 1.
_FORMAT = re.compile(
    r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>((?:(?!</?answer>).)*)</answer>\s*", re.S
)


@dataclass(frozen=True)
class Sample:
    """A response with everything needed to judge it."""

    problem: Problem
    response: str  # the model's own words
    finished: bool  # ended with an end token
    length: int  # sampled tokens, end token included
    turns: tuple[str, ...]  # the text of every turn, the model's first
    full_text: str = ""  # the model's own words with every special token spelled out

    @property
    def texts(self) -> Texts:
        """What a user's function judges."""
        of = self.problem
        turns, full = self.turns, self.full_text
        return Texts(of.key, of.prompt, self.response, of.answer, of.fields, of.messages, turns, full)


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

    @property
    def asked_texts(self) -> tuple[str, ...]:
        """The tags that the reward looks for in a response."""
        has_format = any(isinstance(term, FormatReward) for term in self.config.terms)
        return TAGS if has_format or self.extraction == "answer_tags" else ()


def formatted_answer(response: str) -> str | None:
    """The text between the answer tags of `<think>..</think><answer>..</answer>`; None in any other form."""
    match = _FORMAT.fullmatch(response)
    return None if match is None else match.group(1)


def load_judge(config: RewardConfig, process: UserProcess | None = None) -> Judge:
    """The reward with the user's functions loaded; UserError names what is wrong with them.

    `process`: where they run; None for a process of their own.
    """
    process = process or UserProcess()
    functions = tuple(
        load_function(process, f"reward.terms.{i}.path", term.path, term) if isinstance(term, CalledReward) else None
        for i, term in enumerate(config.terms)
    )
    return Judge(config, functions)


def for_source(judge: Judge, source: Source, extraction: AnswerExtraction) -> Judge:
    """The judge with what a task brings; UserError if a term needs a verifier or answers that the task lacks."""
    verifier = source.verifier
    if isinstance(verifier, PythonFile) and verifier.score is None:
        if any(isinstance(term, Verifier) for term in judge.config.terms):
            raise UserError(
                f"task.path: {verifier.prompts.file} has no function score, which the reward term of kind verifier "
                "calls; add it, or give other reward.terms"
            )
        verifier = None
    if any(isinstance(term, ExactMatch) for term in judge.config.terms) and not source.problems.has_answers:
        raise UserError(
            "reward.terms: exact_match compares responses with answers, and no prompt of the task has one; "
            "give the prompts answers, or other reward.terms"
        )
    return replace(judge, extraction=extraction, verifier=verifier)


def _verified(judge: Judge, samples: Sequence[Sample]) -> list[float]:
    """What the task's verifier says of every response."""
    if isinstance(judge.verifier, GymVerifier):
        answers = [extracted(sample.response, judge.extraction) for sample in samples]
        return judge.verifier.scores([sample.problem.key for sample in samples], answers)
    assert judge.verifier is not None
    return judge.verifier.scores([transcript_of(sample.problem, sample.turns) for sample in samples])


def _format_value(response: str, answer: str) -> float:
    inner = formatted_answer(response)
    return 0.0 if inner is None else 1.0 + matches(inner, answer)


def _values(
    index: int, term: RewardTerm, judge: Judge, samples: Sequence[Sample], model_scores: Sequence[float]
) -> list[float]:
    """The unweighted value of one reward term for every response."""
    function = judge.functions[index]
    if isinstance(term, ExactMatch):
        return [float(s.finished and is_answer(s.response, s.problem.answer, judge.extraction)) for s in samples]
    if isinstance(term, FormatReward):
        return [_format_value(sample.response, sample.problem.answer) for sample in samples]
    if isinstance(term, LengthReward):
        return [-abs(sample.length - term.target) / term.target for sample in samples]
    if isinstance(term, Verifier):
        return _verified(judge, samples)
    if function is not None:
        return numbers(function, [sample.texts for sample in samples])
    return list(model_scores)


def _correct(judge: Judge, samples: Sequence[Sample], columns: Sequence[Sequence[float]]) -> Iterator[bool]:
    """Whether each response is correct, finished or not: by the verifier if it is asked, else by its answer."""
    terms = judge.config.terms
    verified = next((values for term, values in zip(terms, columns, strict=True) if isinstance(term, Verifier)), None)
    has_format = any(isinstance(term, FormatReward) for term in terms)
    for index, sample in enumerate(samples):
        inner = formatted_answer(sample.response) if has_format else None
        if verified is not None:
            yield verified[index] >= 1.0
        elif inner is not None:
            yield matches(inner, sample.problem.answer)
        else:
            yield is_answer(sample.response, sample.problem.answer, judge.extraction)


def _weighted(config: RewardConfig, values: Sequence[float]) -> float:
    """The weighted sum; infinite where float64 cannot hold it."""
    try:
        return math.fsum(term.weight * value for term, value in zip(config.terms, values, strict=True))
    except (OverflowError, ValueError):
        return math.inf


def judge_samples(judge: Judge, samples: Sequence[Sample], model_scores: Sequence[float]) -> Judgement:
    """score = sum of weight times value over the reward terms; then the rules for responses without an end token.

    `model_scores` are the reward model's, one per response, or empty without one. A response is correct if it ended
    by itself with the answer: where the task's verifier is asked, if that gives 1 or more; where a format is rewarded,
    if the text between its answer tags is the answer; else if what the task extracts is.
    UserError if a user's function raises or returns anything but a number, or a score is beyond float32.
    """
    config, finished = judge.config, [sample.finished for sample in samples]
    columns = [_values(i, term, judge, samples, model_scores) for i, term in enumerate(config.terms)]
    term_values = [list(row) for row in zip(*columns, strict=True)]
    correct = [done and right for done, right in zip(finished, _correct(judge, samples, columns), strict=True)]
    weighted = weighted_scores(config, term_values, finished)
    for sample, score in zip(samples, weighted, strict=True):
        if not abs(score) <= FLOAT32_MAX:
            raise UserError(
                f"reward: the score {score:g} for prompt key '{shown(sample.problem.key)}' is beyond float32 "
                f"({FLOAT32_MAX:.1e}); choose smaller weights in reward.terms"
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
    """UserError if a user's function gives two scores for one input: the answer, and nothing, to two prompts."""
    rows = [
        Sample(problem, response, True, 1, (response,), response).texts
        for problem in problems[:2]
        for response in (problem.answer, "")
    ]
    for function in judge.functions:
        if function is not None:
            check_repeats(function, rows)
