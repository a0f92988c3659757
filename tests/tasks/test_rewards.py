"""What a response is worth: rules, verifiers and functions, all of the model's own words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from ppo_repro.config.reward import RewardConfig
from ppo_repro.config.tasks import PythonTask
from ppo_repro.errors import UserError
from ppo_repro.runs.prepare import prepare
from ppo_repro.stages.rewards import sample_of
from ppo_repro.tasks.problems import Problem, Split
from ppo_repro.tasks.rewards import (
    Judge,
    Judgement,
    Sample,
    extracted,
    for_source,
    formatted_answer,
    is_answer,
    judge_samples,
    load_judge,
)
from ppo_repro.tasks.sources import Source, load_source
from ppo_repro.tasks.tokenizer import spelled_tokens, train_bpe
from tests.support.runs import small_config
from tests.support.turns import turns_config


def config_of(*terms: dict[str, Any], **other: Any) -> RewardConfig:
    return RewardConfig.model_validate({"terms": terms or ({"kind": "exact_match"},), **other})


def judged(judge: Judge, rows: list[tuple[str, str, bool]], model_scores: list[float] | None = None) -> Judgement:
    """Of (response, answer, finished) each; a response has as many tokens as characters."""
    samples = [Sample(Problem("p", "p", answer), r, done, len(r), (r,)) for r, answer, done in rows]
    return judge_samples(judge, samples, model_scores or [])


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("17 + 28 = 45", "45"),
        ("It is 1,234,567.50 in all.", "1234567.50"),
        ("3-2", "2"),
        ("x = -2", "-2"),
        ("(5) -7 degrees", "-7"),
        ("1,2", "2"),
        ("about 12.", "12"),
        ("", None),
        ("٣", None),
    ],
)
def test_the_last_number(response: str, number: str | None) -> None:
    assert extracted(response, "last_number") == number


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
    assert is_answer("so 85.0", "85", "last_number") and not is_answer("so 85.1", "85", "last_number")
    assert is_answer("85,000", "85000", "last_number") and not is_answer("85", "eighty-five", "last_number")
    assert not is_answer("85.0", "85", "exact") and is_answer(" 85\n", "85", "exact")
    assert not is_answer("1 2", "12", "exact") and not is_answer("112", "12", "exact")


@given(st.text(max_size=40), st.integers(-(10**9), 10**9))
def test_a_number_after_any_text_and_a_space_is_the_last_one(text: str, number: int) -> None:
    assert is_answer(f"{text} {number}", str(number), "last_number")
    assert is_answer(f"{text} {number:,}", str(number), "last_number")
    assert is_answer(f"{text}<answer>{number}</answer>", str(number), "answer_tags")


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


def test_a_verifier_gets_all_responses_in_one_call(tmp_path: Path) -> None:
    text = "def prompts():\n    return [{'prompt': f'p{i}', 'level': i} for i in range(6)]\n"
    text += "def score(transcripts):\n    return [t.fields['level'] + 10 * len(transcripts) for t in transcripts]\n"
    (tmp_path / "task.py").write_text(text)
    source = load_source(PythonTask(kind="python", path=f"{tmp_path}/task.py", num_eval_prompts=2), 0)
    judge = for_source(load_judge(config_of({"kind": "verifier", "weight": 0.5})), source, "exact")
    samples = [Sample(source.problems.by_key[f"p{i}"], "x", True, 1, ("x",)) for i in range(6)]
    assert judge_samples(judge, samples, []).term_values == [[60.0 + i] for i in range(6)]


RIGHT = "<answer>RIGHT</answer>"
ENVIRONMENT = f"""
def prompts(): return [{{"prompt": ":" * i, "answer": "RIGHT", "key": str(i)}} for i in range(1, 9)]
def step(transcript): return "{RIGHT}" if len(transcript.turns) == 1 else None
def score(transcripts): return [float("RIGHT" in t.own) for t in transcripts]
"""
OTHERS = """
def own(prompt, response, answer): return float("RIGHT" in response)
def trl(completions, **_): return [float("RIGHT" in c) for c in completions]
def verl(data_source, solution_str, ground_truth, extra_info): return float("RIGHT" in solution_str)
def whole(prompt, response, answer, turns): return float(any("RIGHT" in t.text for t in turns))
"""


def test_no_reward_judges_what_the_environment_says(tmp_path: Path) -> None:
    """A random model, and an environment that gives the answer away; the control asks for the environment's turn."""
    (tmp_path / "r.py").write_text(OTHERS)
    config = turns_config(
        tmp_path,
        "task.answer_extraction=answer_tags",
        "model.warm_start_steps=0",
        "model.vocab_size=60",
        "rollout.stop=['I', 'R', ':']",
        "rollout.max_response_tokens=40",
        "numerics.max_context=64",
        f"reward.terms=[{{kind: exact_match}}, {{kind: verifier}}, {{kind: function, path: '{tmp_path}/r.py:own'}}, "
        f"{{kind: trl, path: '{tmp_path}/r.py:trl'}}, {{kind: verl, path: '{tmp_path}/r.py:verl'}}, "
        f"{{kind: function, path: '{tmp_path}/r.py:whole'}}]",
        task=ENVIRONMENT,
    )
    task = prepare(config, lambda step, total, loss: None).task
    tokenizer = task.tokenizer
    ids = tokenizer("::", add_special_tokens=False)["input_ids"]
    sample = sample_of(task, "1", ids, ("::", RIGHT, "G"), "stop", is_episode=True)
    assert sample.response == "::G"
    found = judge_samples(task.judge, [sample], [])
    assert found.term_values == [[0.0, 0.0, 0.0, 0.0, 0.0, 1.0]] and found.correct == [False]


def test_special_tokens_are_text_where_a_reward_or_a_stop_text_asks_for_them() -> None:
    tokenizer = train_bpe(["12 RIGHT<>/answer"], 40)
    tokenizer.add_tokens([AddedToken(text, special=True) for text in ("<answer>", "</answer>", "<end>")])
    ids = tokenizer(f"{RIGHT}<end>")["input_ids"] + [1]
    assert len(set(ids) & set(tokenizer.added_tokens_decoder)) == 4
    problem, judge = Problem("k", "p", "RIGHT"), load_judge(config_of())
    config = prepare(small_config(), lambda step, total, loss: None).task
    for extraction, stop, text, right in (
        ("exact", (), "RIGHT", True),
        ("answer_tags", (), RIGHT, True),
        ("answer_tags", ("<end>",), f"{RIGHT}<end>", True),
    ):
        asking = replace(judge, extraction=extraction)
        spelled = spelled_tokens(tokenizer, [*asking.asked_texts, *stop])
        task = replace(config, judge=asking, spelled=spelled, tokenizer=tokenizer, problems=Split((problem,), ()))
        sample = sample_of(task, "k", ids, ("RIGHT",), "stop", is_episode=False)
        assert sample.response == text and judge_samples(asking, [sample], []).correct == [right]
    assert not is_answer("RIGHT", "RIGHT", "answer_tags"), "what was seen before"


def test_without_answers_an_exact_match_is_refused() -> None:
    source = Source(Split((Problem("k", "p", ""),), (Problem("l", "q", ""),)), None)
    with pytest.raises(UserError, match=r"exact_match compares responses with answers, and no prompt of the task has"):
        for_source(load_judge(config_of()), source, "exact")
    for_source(load_judge(config_of({"kind": "format"})), source, "exact")
