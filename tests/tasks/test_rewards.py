"""What a response is worth: rules, verifiers and functions, all of the model's own words."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.config.tasks import RewardConfig
from ppo_repro.tasks.problems import Problem
from ppo_repro.tasks.rewards import (
    Judge,
    Judgement,
    Sample,
    extracted,
    formatted_answer,
    is_answer,
    judge_samples,
    load_judge,
)


def config_of(*terms: dict[str, Any], **other: Any) -> RewardConfig:
    return RewardConfig.model_validate({"terms": terms or ({"kind": "exact_match"},), **other})


def judged(judge: Judge, rows: list[tuple[str, str, bool]], model_scores: list[float] | None = None) -> Judgement:
    """Of (response, answer, finished) each; a response has as many tokens as characters."""
    samples = [Sample(Problem("p", "p", answer), r, done, len(r), (r,)) for r, answer, done in rows]
    return judge_samples(judge, samples, model_scores or [])


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>6</answer> no: <answer>7\n</answer> so", "7\n"),
        ("<answer><answer>7</answer>", "7"),
        ("<answer>7", None),
        ("<answer></answer>", ""),
    ],
)
def test_the_last_answer_tags(response: str, answer: str | None) -> None:
    assert extracted(response, "answer_tags") == answer


def test_numbers_are_compared_by_value_and_texts_by_letters() -> None:
    assert is_answer("so 85.0", "85", "last_number")
    assert not is_answer("so 85.1", "85", "last_number")
    assert is_answer("85,000", "85000", "last_number")
    assert not is_answer("85", "eighty-five", "last_number")
    assert not is_answer("85.0", "85", "exact")
    assert is_answer(" 85\n", "85", "exact")
    assert not is_answer("1 2", "12", "exact")
    assert not is_answer("112", "12", "exact")


GOOD = "<think>7+5</think> <answer>12</answer>"
EXACT, FORMAT, LENGTH = {"kind": "exact_match"}, {"kind": "format"}, {"kind": "length", "target": 4}


@pytest.mark.parametrize(
    ("terms", "penalty", "rows", "values", "scores", "correct"),
    [
        ([EXACT], 0.0, [("12", True), ("12", False), ("13", True)], [[1], [0], [0]], [1, 0, 0], [True, False, False]),
        # exact 1, format 0; length -|2 - 4| / 4; 2 * 1 + 3 * 0 - 10 * 0.5
        (
            [{**EXACT, "weight": 2.0}, {**FORMAT, "weight": 3.0}, {**LENGTH, "weight": 10.0}],
            0.0, [("12", True)], [[1, 0, -0.5]], [-3], [True],
        ),
        # the form, and the answer in it; without the form the response itself is compared
        (
            [FORMAT], 0.0, [(GOOD, True), (GOOD.replace("12", "13"), True), ("12", True)],
            [[2], [1], [0]], [2, 1, 0], [True, False, True],
        ),
        ([LENGTH], 2.0, [("12", False), ("12", True)], [[-0.5], [-0.5]], [-2.5, -0.5], [False, True]),
        (
            [{"kind": "model", "path": "m", "weight": 0.5}, EXACT],
            0.0, [("12", True), ("1", True)], [[4, 1], [-2, 0]], [3, -1], [True, False],
        ),
    ],
)  # fmt: skip
def test_scores_by_hand(
    terms: list[dict[str, Any]],
    penalty: float,
    rows: list[tuple[str, bool]],
    values: list[list[float]],
    scores: list[float],
    correct: list[bool],
) -> None:
    judge = load_judge(config_of(*terms, missing_eos_penalty=penalty))
    found = judged(judge, [(response, "12", done) for response, done in rows], [4.0, -2.0])
    assert found == Judgement(scores, values, correct)


def test_a_prompt_without_an_answer_has_no_right_answer() -> None:
    judge = load_judge(config_of(FORMAT))
    found = judged(judge, [("<think></think><answer></answer>", "", True), ("", "", True)])
    assert found == Judgement([1.0, 0.0], [[1.0], [0.0]], [False, False])


@pytest.mark.parametrize("weights", [[1e39], [1e308, 1e308], [-1e39]])
def test_a_score_beyond_float32_is_the_users_mistake(weights: list[float]) -> None:
    judge = load_judge(config_of(*({"kind": "exact_match", "weight": weight} for weight in weights)))
    assert judged(judge, [("r", "a", True)]).scores == [0.0]
    with pytest.raises(UserError, match=r"reward: the score .* for prompt key 'p' is beyond float32 \(3\.4e\+38\)"):
        judged(judge, [("a", "a", True)])


@pytest.mark.parametrize(
    ("response", "inner"),
    [
        (f" {GOOD}\n", "12"),
        ("<think></think><answer></answer>", ""),
        ("<think>a\nb</think>\n<answer> 1\n2 </answer>", " 1\n2 "),
        (f"so {GOOD}", None),
        (f"{GOOD}{GOOD}", None),
        ("<answer>12</answer>", None),
        ("<think><think>7</think></think><answer>12</answer>", None),
        ("<answer>12</answer><think>7</think>", None),
        ("<think>7</think><answer>12", None),
    ],
)
def test_the_format_is_thoughts_then_answer_and_nothing_else(response: str, inner: str | None) -> None:
    assert formatted_answer(response) == inner
