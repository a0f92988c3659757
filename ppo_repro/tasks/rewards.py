"""Compute the score of a response by rules, the user's Python functions and the scores of a reward model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ppo_repro.base.errors import UserError
from ppo_repro.base.float32 import FLOAT32_MAX
from ppo_repro.base.output import shown
from ppo_repro.config.tasks import (
    AnswerExtraction,
    CalledReward,
    ExactMatch,
    FormatReward,
    LengthReward,
    PythonTask,
    RewardConfig,
    RewardTerm,
    StepsReward,
    TaskConfig,
    Verifier,
)
from ppo_repro.tasks.problems import Problem, Source, row_of
from ppo_repro.tasks.written_numbers import is_number, last_number
from ppo_repro.user.process import UserFunction, UserProcess, check_alone, check_repeats, load_reward

_TAGS = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.S)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")

# thoughts, then the answer, each in its own tags and nothing outside them. DeepSeek-AI, 2025, table 1.
_FORMAT = re.compile(
    r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>((?:(?!</?answer>).)*)</answer>\s*", re.S
)


def extracted(response: str, extraction: AnswerExtraction) -> str | None:
    """Return the answer in a response: the whole text, its last number, or the text of its last answer tags.

    None if the response has no number or no answer tags. `written_numbers.py` says what a number is.
    """
    if extraction == "exact":
        return response
    if extraction == "last_number":
        return last_number(response)
    texts = _TAGS.findall(response)
    return str(texts[-1]) if texts else None


def matches(response: str, answer: str) -> bool:
    """Return whether the response equals the answer, if it is not empty. Surrounding white space does not count."""
    return response.strip() == answer.strip() != ""


def is_answer(response: str, answer: str, extraction: AnswerExtraction) -> bool:
    """Return whether the answer that `extraction` finds in a response equals the expected answer.

    With `last_number` numbers are compared by value, so that 85.0 is 85.
    """
    given_answer = extracted(response, extraction)
    if given_answer is None:
        return False
    return is_number(given_answer, answer) if extraction == "last_number" else matches(given_answer, answer)


def right_steps(response: str, steps: Sequence[str]) -> list[int]:
    """Return the end, in characters, of each right step; step n is right if it equals word n of the response."""
    ends, end = [], -1
    for word, step in zip(response.split(" "), steps, strict=False):
        end += 1 + len(word)
        if word == step:
            ends.append(end)
    return ends


@dataclass(frozen=True)
class Sample:
    """Response with all data that a reward needs."""

    problem: Problem
    response: str  # the text of the model's turns
    finished: bool  # ended with an end token
    length: int  # sampled tokens, end token included
    turns: tuple[str, ...]  # the text of every turn, from the model's first turn on
    full_text: str = ""  # the response with every special token spelled out
    ids: tuple[int, ...] = ()  # the sampled tokens

    @property
    def row(self) -> dict[str, Any]:
        """Return the sample as a row of arguments for the process of the user's functions."""
        return row_of(self.problem, self.turns, self.response, self.full_text, self.ids)


@dataclass(frozen=True)
class Judgement:
    """Scores of some responses, one entry per response."""

    scores: list[float]
    term_values: list[list[float]]  # the unweighted value of each reward term
    correct: list[bool]


@dataclass(frozen=True)
class Judge:
    """Reward of a configuration, with its loaded functions."""

    config: RewardConfig
    functions: tuple[UserFunction | None, ...]  # one entry per term
    extraction: AnswerExtraction = "exact"
    verifier: UserFunction | None = None  # the task's verifier

    @property
    def called(self) -> tuple[UserFunction | None, ...]:
        """Return the functions that judge responses: one entry per term, and the verifier if a term asks it."""
        return (*self.functions, self.verifier if _asks_verifier(self.config) else None)

    @property
    def asked_texts(self) -> tuple[str, ...]:
        """Return the tags that the reward looks for in a response."""
        has_format = any(isinstance(term, FormatReward) for term in self.config.terms)
        return TAGS if has_format or self.extraction == "answer_tags" else ()


def _asks_verifier(config: RewardConfig) -> bool:
    return any(isinstance(term, Verifier) for term in config.terms)


def formatted_answer(response: str) -> str | None:
    """Return the text between the answer tags of `<think>..</think><answer>..</answer>`; None in any other form."""
    match = _FORMAT.fullmatch(response)
    return None if match is None else match.group(1)


def load_judge(config: RewardConfig, process: UserProcess | None = None) -> Judge:
    """Load the user's functions of a reward. Raises UserError for the first mistake.

    The functions run in `process`, or in a new process if that is None.
    """
    process = process or UserProcess()
    functions = tuple(
        load_reward(process, f"reward.terms.{i}.path", term) if isinstance(term, CalledReward) else None
        for i, term in enumerate(config.terms)
    )
    return Judge(config, functions)


def for_source(judge: Judge, source: Source, task: TaskConfig) -> Judge:
    """Return the judge with the verifier and the answer extraction of a task.

    Raises UserError if a term needs a verifier or answers that the task does not have, or if `check_functions` refuses
    a user's function. The texts are answer, prompt and the empty text of two prompts, and the answer again.
    """
    if isinstance(task, PythonTask) and source.verifier is None and _asks_verifier(judge.config):
        raise UserError(
            f"task.path: {task.path} has no function score, which the reward term of kind verifier calls; add it, or "
            "give other reward.terms"
        )
    if any(isinstance(term, ExactMatch) for term in judge.config.terms) and not source.problems.has_answers:
        raise UserError(
            "reward.terms: exact_match compares responses with answers, and no prompt of the task has one; "
            "give the prompts answers, or other reward.terms"
        )
    texts = [(p, text) for p in source.problems.train[:2] for text in (p.answer, "", p.prompt, p.answer)]
    rows = [row_of(p, [text], text, text, [*text.encode(), 0]) for p, text in texts]  # there is no tokenizer yet
    options = {"has_answers": source.problems.has_answers}
    functions = tuple(f and replace(f, options={**f.options, **options}) for f in judge.functions)
    check_functions((*functions, source.verifier, source.step), rows)
    return replace(judge, functions=functions, extraction=task.answer_extraction, verifier=source.verifier)


def check_functions(functions: Sequence[UserFunction | None], rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError if a user's function returns two results for the same input, or compares the responses of a call.

    No function of a package is checked.
    """
    for function in functions:
        if function is not None and function.call != "keywords":
            check_repeats(function, rows)
        if function is not None and function.call == "trl":
            check_alone(function, rows)


def _values(
    index: int, term: RewardTerm, judge: Judge, samples: Sequence[Sample], model_scores: Sequence[float]
) -> list[float]:
    """Return the unweighted value of one reward term for every response."""
    function = judge.functions[index]
    if isinstance(term, ExactMatch):
        return [float(s.finished and is_answer(s.response, s.problem.answer, judge.extraction)) for s in samples]
    if isinstance(term, StepsReward):
        return [len(right_steps(s.response, s.problem.steps)) / len(s.problem.steps) for s in samples]
    if isinstance(term, FormatReward):
        inner = [formatted_answer(sample.response) for sample in samples]
        pairs = zip(inner, samples, strict=True)
        return [0.0 if text is None else 1.0 + matches(text, sample.problem.answer) for text, sample in pairs]
    if isinstance(term, LengthReward):
        return [-abs(sample.length - term.target) / term.target for sample in samples]
    if isinstance(term, Verifier):
        assert judge.verifier is not None
        if judge.verifier.call == "scores":
            return judge.verifier([sample.row for sample in samples])
        return judge.verifier(
            [{"key": s.problem.key, "answer": extracted(s.response, judge.extraction)} for s in samples]
        )
    if function is not None:
        return function([sample.row for sample in samples])
    return list(model_scores)


def _correct(judge: Judge, samples: Sequence[Sample], columns: Sequence[Sequence[float]]) -> Iterator[bool]:
    """Yield whether each response, finished or not, is right: by the verifier if a term asks it, else by its answer."""
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


def judge_samples(judge: Judge, samples: Sequence[Sample], model_scores: Sequence[float]) -> Judgement:
    """Compute score = sum_k weight_k value_k over the reward terms; then apply the rules for cut responses.

    A response is correct if it ended by itself with the right answer. If a term asks the task's verifier, 1 or more
    means right. If a format is rewarded and the response has it, the text between the answer tags must be the answer.
    Otherwise the extracted answer must be the answer. `model_scores` are the scores of a reward model, one per
    response, or empty.

    Raises UserError if a user's function raises or does not return a number, or if a score is beyond float32.
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
    """Return sum_k weight_k value_k over the reward terms, minus the penalty if the response was cut.

    A sum beyond float64 is infinite.
    """
    scores = []
    for values, done in zip(term_values, finished, strict=True):
        try:
            score = math.fsum(term.weight * value for term, value in zip(config.terms, values, strict=True))
        except (OverflowError, ValueError):
            score = math.inf
        scores.append(score if done else score - config.missing_eos_penalty)
    return scores
