"""A task in a Python file: its prompts, its scores in batches, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppo_repro.config.files import load_config
from ppo_repro.config.reward import RewardConfig
from ppo_repro.config.tasks import JsonlTask, PythonTask
from ppo_repro.errors import UserError
from ppo_repro.tasks.dialogue import around_reply
from ppo_repro.tasks.problems import Problem, encoder
from ppo_repro.tasks.python_task import check_file, load_file, read_prompts, scores
from ppo_repro.tasks.rewards import Samples, for_source, judge_samples, load_judge
from ppo_repro.tasks.sources import load_source
from ppo_repro.tasks.tokenizer import train_bpe
from ppo_repro.tasks.transcripts import make_transcript
from tests.support.paths import TINY

PROMPTS = "def prompts():\n    return [{'prompt': f'p{i}', 'answer': f'a{i}', 'level': i} for i in range(6)]\n"
SCORE = """
calls = []


def score(transcripts):
    calls.append(len(transcripts))
    return [t.fields['level'] for t in transcripts]
"""


def task(folder: Path, text: str) -> PythonTask:
    (folder / "task.py").write_text(text)
    return PythonTask(kind="python", path=str(folder / "task.py"), num_eval_prompts=2)


def samples(*problems: Problem) -> Samples:
    count = len(problems)
    texts = [p.prompt for p in problems], ["x"] * count, [p.answer for p in problems]
    return Samples([p.key for p in problems], *texts, [True] * count, [1] * count)


def test_prompts_keep_their_other_fields_and_scores_come_in_one_call(tmp_path: Path) -> None:
    of = task(tmp_path, PROMPTS + SCORE)
    source = load_source(of, 0)
    problems = sorted((*source.problems.train, *source.problems.held_out), key=lambda p: p.key)
    assert problems[3] == Problem("p3", "p3", "a3", '{"level": 3}')
    config = RewardConfig.model_validate({"terms": [{"kind": "verifier"}]})
    judge = for_source(load_judge(config), source, "deterministic")
    judged = judge_samples(judge, samples(*problems), [])
    assert judged.scores == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert judged.correct == [False, True, True, True, True, True], "1 or more is a right answer"
    assert source.verifier.score.__globals__["calls"] == [6]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("def prompts():\n    return [{'prompt': 'a'}, 3]\n", "entry 1 of prompts.*is a int; must be a dict"),
        (
            "def prompts():\n    return [{'prompt': 'a'}, {'prompt': 'a'}]\n",
            "key 'a' is also that of entry 0",
        ),
        ("def prompts():\n    return [{'answer': 'a'}]\n", "field 'prompt' is missing or null"),
        ("def prompts():\n    return [{'prompt': 'a', 'of': {1, 2}}]\n", "has a value that JSON does not have"),
        ("def prompts():\n    return 'abc'\n", "it must return a list of prompts, not a str"),
        ("def prompts():\n    return 1 / 0\n", "task.py:2: prompts.. raised ZeroDivisionError"),
        (
            "import random\ndef prompts():\n    return [{'prompt': str(random.random())}]\n",
            "returned other prompts",
        ),
        ("prompts = 3\n", "prompts is no function"),
        ("def prompts(:\n", "task.py:1 fails to load"),
    ],
)
def test_prompts_that_are_wrong_are_named(prompts: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^task\\.path: .*{message}"):
        read_prompts(load_file(task(tmp_path, prompts)))


def test_a_score_that_depends_on_the_order_of_the_batch_is_refused(tmp_path: Path) -> None:
    of = load_file(task(tmp_path, PROMPTS + "def score(ts):\n    return [i for i, _ in enumerate(ts)]\n"))
    rows = [make_transcript(p.key, p.prompt, p.answer, p.fields, ["x"]) for p in read_prompts(of)]
    assert scores(of, rows) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(UserError, match=r"task\.py:3: score returned 0\.0 and then 5\.0 for the same transcript"):
        check_file(of, rows)


def test_a_function_gets_the_other_fields_of_a_line_where_it_asks_for_them(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def f(prompt, response, answer, fields):\n    fields['n'] += 1\n    return fields['n']\n"
    )
    rows = [{"prompt": f"p{i}", "answer": "", "n": i} for i in range(4)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = load_source(JsonlTask(kind="jsonl", path=str(tmp_path / "p.jsonl"), num_eval_prompts=1), 0)
    config = RewardConfig.model_validate({"terms": [{"kind": "function", "path": f"{tmp_path}/r.py:f"}]})
    judge = for_source(load_judge(config), source, "deterministic")
    problems = sorted((*source.problems.train, *source.problems.held_out), key=lambda p: p.key)
    for _ in range(2):  # what it changes in them is lost
        assert judge_samples(judge, samples(*problems), []).scores == [1.0, 2.0, 3.0, 4.0]


def test_the_usual_term_of_a_task_with_a_verifier_is_the_verifier(tmp_path: Path) -> None:
    task(tmp_path, PROMPTS + SCORE)
    section = f"task={{kind: python, path: '{tmp_path}/task.py', num_eval_prompts: 2}}"
    assert [term.kind for term in load_config(TINY, [section]).reward.terms] == ["verifier"]
    with pytest.raises(UserError, match=r"kind verifier need task\.kind = reasoning_gym or python"):
        load_config(TINY, ["reward.terms=[{kind: verifier}]"])


def test_a_system_prompt_and_a_reply_in_a_chat_template() -> None:
    tokenizer = train_bpe(["ab<>|/;usaSB"], 30)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'][0] }}|{{ m['content'] }}>{% endfor %}"
        "{% if add_generation_prompt %}<a|{% endif %}"
    )
    ids = encoder(tokenizer, True, "SB")(Problem("k", "ab", ""))
    assert tokenizer.decode(ids) == "<s|SB><u|ab><a|"
    assert around_reply(tokenizer) == ("><u|", "><a|")
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(UserError, match=r"^task\.system_prompt: this tokenizer's chat template leaves it out"):
        encoder(tokenizer, True, "SB")(Problem("k", "ab", ""))
    with pytest.raises(UserError, match="leaves turns out"):
        around_reply(tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no system turn') }}"
    with pytest.raises(UserError, match=r"template refuses the chat \(no system turn"):
        encoder(tokenizer, True)(Problem("k", "ab", ""))
