"""Rewards written for TRL and verl work as they are, one response at a time; what is wrong in them is one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ppo_repro.config.files import build_config
from ppo_repro.config.reward import RewardConfig, TrlReward, VerlReward
from ppo_repro.errors import UserError
from ppo_repro.tasks.adapters import adapter
from ppo_repro.tasks.problems import Problem, read_jsonl
from ppo_repro.tasks.rewards import Samples, check_functions, judge_samples, load_judge, reward_files
from tests.support.runs import small_config

# as in TRL's documentation
TRL = """
import re

def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

def accuracy(prompts, completions, answer, **kwargs):
    assert len(prompts) == len(completions) == len(answer) == 1
    return [1.0 if a in c else 0.0 for a, c in zip(answer, completions)]

def letters(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [float(len(set(content))) for content in contents]

def batch(completions, **kwargs):
    return [0.0, 1.0]

def single(completions, **kwargs):
    return 1.0

def skipped(completions, **kwargs):
    return [None]

def ids(completion_ids, **kwargs):
    return [float(len(completion_ids[0]))]
"""
# as in verl's documentation
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and extra_info == {}
    return 1.0 if solution_str.strip() == ground_truth else 0.1

def graded(data_source, solution_str, ground_truth, extra_info):
    return {"score": compute_score(data_source, solution_str, ground_truth, extra_info) / 2, "acc": True}

def nameless(data_source, solution_str, ground_truth, extra_info):
    return {"acc": True}
"""


def config_of(kind: str, file: Path, name: str, **more: object) -> RewardConfig:
    tree = small_config().model_dump(mode="json")
    term = {"kind": kind, "path": f"{file}:{name}", **more}
    return build_config({**tree, "reward": {"terms": [term]}}, "test").reward


def scores(config: RewardConfig, *rows: tuple[str, str, str]) -> list[float]:
    prompts, responses, answers = zip(*rows, strict=True)
    count = len(rows)
    samples = Samples(prompts, prompts, responses, answers, [True] * count, [1] * count)
    return judge_samples(load_judge(config), samples, []).scores


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(TRL + VERL)
    return tmp_path / "rewards.py"


def test_rewards_of_trl_work_as_they_are(file: Path) -> None:
    rows = ("1+1=", "2", "2"), ("2+2=", "four", "4")
    assert scores(config_of("trl", file, "length"), *rows) == [1.0, 4.0]
    assert scores(config_of("trl", file, "accuracy"), *rows) == [1.0, 0.0]
    assert scores(config_of("trl", file, "letters", conversational=True), *rows) == [1.0, 4.0]
    assert reward_files(config_of("trl", file, "length")) == [file]


def test_rewards_of_verl_work_as_they_are(file: Path) -> None:
    rows = ("1+1=", "2", "2"), ("2+2=", "four", "4")
    assert scores(config_of("verl", file, "compute_score", data_source="openai/gsm8k"), *rows) == [1.0, 0.1]
    assert scores(config_of("verl", file, "graded", data_source="openai/gsm8k"), *rows) == [0.5, 0.05]


def test_other_fields_of_a_prompt_are_columns() -> None:
    seen: list[dict[str, object]] = []

    def reward(**arguments: object) -> list[float]:
        seen.append(arguments)
        return [0.5]

    trl = TrlReward(kind="trl", path="r.py:f")
    assert adapter(trl)(reward)("p", "r", "a", fields={"level": 3, "completions": "not mine"}) == 0.5
    assert seen == [{"prompts": ["p"], "completions": ["r"], "answer": ["a"], "level": [3]}]

    def compute_score(**arguments: object) -> float:
        seen.append(arguments)
        return 0.25

    verl = VerlReward(kind="verl", path="r.py:f", data_source="usual")
    of_verl = adapter(verl)(compute_score)
    assert of_verl("p", "r", "a", fields={"data_source": "own", "extra_info": {"index": 7}}) == 0.25
    assert of_verl("p", "r", "a", fields={"index": 7}) == 0.25
    same = {"solution_str": "r", "ground_truth": "a", "extra_info": {"index": 7}}
    assert seen[1:] == [{"data_source": "own", **same}, {"data_source": "usual", **same}]


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("trl", "batch", r"raised ValueError: must return a list with one number .* returned list of 2"),
        ("trl", "single", r"must return a list with one number .* returned float"),
        ("trl", "skipped", r"the function returned None for prompt key 'p'; must be a finite number"),
        ("trl", "ids", r"raised TypeError: .*completion_ids"),
        ("trl", "nowhere", r"has no function nowhere"),
        ("verl", "compute_score", r"raised AssertionError"),
        (
            "verl",
            "nameless",
            r"raised ValueError: must return a number or a dict with 'score'; returned one with \['acc'\]",
        ),
    ],
)
def test_what_is_wrong_is_one_line_with_the_file(file: Path, kind: str, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        scores(config_of(kind, file, name), ("p", "r", "a"))
    assert "\n" not in str(error.value) and str(file) in str(error.value)


def test_a_reward_that_depends_on_earlier_calls_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("seen = []\ndef f(completions, **_):\n    seen.append(1)\n    return [len(seen)]\n")
    judge = load_judge(config_of("trl", tmp_path / "r.py", "f"))
    with pytest.raises(UserError, match="for the same input"):
        check_functions(judge, [Problem("1", "p", "a"), Problem("2", "q", "b")])


def test_other_fields_of_the_file_reach_the_function(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "p", "answer": "a", "level": 3, "data_source": "own"}\n{"prompt": "q", "answer": "b", "level": 4}\n'
    )
    (tmp_path / "r.py").write_text(
        "def t(completions, level, **_): return [float(n) for n in level]\n"
        "def v(data_source, solution_str, ground_truth, extra_info): return extra_info['level'] + len(data_source)\n"
    )
    problems = {p.key: p.fields for p in read_jsonl(tmp_path / "p.jsonl")}
    for kind, name, expected in (("trl", "t", [3.0, 4.0]), ("verl", "v", [6.0, 4.0])):
        judge = replace(load_judge(config_of(kind, tmp_path / "r.py", name)), fields=problems)
        samples = Samples(["p", "q"], ["p", "q"], ["x", "y"], ["a", "b"], [True, True], [1, 1])
        assert judge_samples(judge, samples, []).scores == expected
