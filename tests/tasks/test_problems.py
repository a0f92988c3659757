"""Prompts: where they come from, their split and order, as token ids, and what is wrong with them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.base.errors import UserError
from ppo_repro.base.watcher import Silent
from ppo_repro.config.tasks import JsonlTask, PythonTask
from ppo_repro.tasks.dialogue import around_reply
from ppo_repro.tasks.problems import Problem, Split, arithmetic, column_addition, load_source, read_problems, split
from ppo_repro.tasks.templates import encode_all, encoder
from ppo_repro.tasks.tokenizer import train_bpe
from tests.support.runs import small_config


def numbered(count: int) -> list[Problem]:
    return [Problem(f"k{i}", f"p{i}", f"a{i}") for i in range(count)]


def jsonl(folder: Path, *lines: Any) -> Path:
    path = folder / "p.jsonl"
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines), encoding="utf-8")
    return path


def of_file(**more: Any) -> JsonlTask:
    return JsonlTask(kind="jsonl", path="p.jsonl", num_eval_prompts=1, **more)


@given(st.integers(2, 4), st.integers(2, 10), st.integers(1, 100))
def test_column_additions_differ_and_every_step_is_right(digits: int, base: int, percent: int) -> None:
    pairs = ((base - 1) * base ** (digits - 1)) ** 2
    found = column_addition(digits, base, size := max(1, min(300, pairs) * percent // 100))
    assert len({p.prompt for p in found}) == size
    assert found == column_addition(digits, base, size)
    for problem in found:
        left, right = problem.prompt.removesuffix("=").split("+")
        assert len(left) == len(right) == digits
        assert "0" not in (left[0], right[0])
        assert int(left, base) + int(right, base) == int(problem.answer, base)
        totals = [step.split("=") for step in problem.steps[::2]]
        assert all(sum(int(x) for x in terms.split("+")) == int(total, base) for terms, total in totals)
        # the digits of a column, and 1 where the step before has a carry
        carries = [False, *(len(total) == 2 for _, total in totals)]
        columns = zip(reversed(left), reversed(right), carries, strict=False)
        assert [terms for terms, _ in totals] == [f"{x}+{y}{'+1' if carry else ''}" for x, y, carry in columns]
        results = ["".join(total[-1] for _, total in totals[k::-1]) for k in range(digits)]
        assert results[:-1] == list(problem.steps[1::2])
        assert problem.answer.endswith(results[-1])
        assert problem.solution == " ".join([*problem.steps, problem.answer])


@given(st.integers(2, 40), st.integers(0, 2**63 - 1), st.randoms(use_true_random=False), st.data())
def test_a_split_is_disjoint_complete_and_blind_to_order_and_texts(count: int, seed: int, random, data) -> None:
    problems = numbered(count)
    held_out = data.draw(st.integers(1, count - 1))
    found = split(problems, held_out, seed)
    assert len(found.held_out) == held_out
    assert Counter(found.train + found.held_out) == Counter(problems)
    assert split(random.sample(problems, count), held_out, seed) == found
    reworded = [Problem(p.key, "x" + p.prompt, "y") for p in problems]
    assert [p.key for p in split(reworded, held_out, seed).train] == [p.key for p in found.train]


def test_a_split_depends_on_the_seed_and_leaves_something_to_train_on() -> None:
    assert len({tuple(p.key for p in split(numbered(50), 10, seed).held_out) for seed in range(20)}) == 20
    with pytest.raises(UserError, match=r"task.num_eval_prompts = 4: there are 4 prompts; leave some to train on"):
        split(numbered(4), 4, 0)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1), st.booleans())
def test_jsonl_reads_any_text(tmp_path_factory: pytest.TempPathFactory, text: str, escaped: bool) -> None:
    """Also U+2028, U+0085 and others that cut a text into lines elsewhere but may stand in JSON as they are."""
    line = json.dumps({"prompt": text, "answer": text}, ensure_ascii=escaped)
    assert read_problems(jsonl(tmp_path_factory.mktemp("text"), line)) == [Problem(text, text, text)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ('{"prompt": "x"}', "field 'answer' is missing, and other lines have one; give all lines one, or none"),
        ('{"prompt": "x", "answer": 3}', "field 'answer' = 3; must be a text"),
        ('{"prompt": "fine", "answer": "x", "key": "k"}', "prompt 'fine' is also that of line 1"),
        ('{"prompt": "x", "answer": "x", "key": "fine"}', "key 'fine' is also that of line 1"),
        ('{"prompt": ["x"], "answer": ""}', "field 'prompt': a message must be an object with 'role' and 'content'"),
        ('{"prompt": [{"role": "assistant", "content": "x"}], "answer": ""}', "field 'prompt' has the roles assist"),
    ],
)
def test_a_mistake_in_jsonl_is_named_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = jsonl(tmp_path, {"prompt": "fine", "answer": "1"}, "", line)
    with pytest.raises(UserError) as caught:
        read_problems(path, chat_template=True)
    assert str(caught.value).startswith(f"{path}:3: {message}")


def test_prompts_become_ids_and_the_unservable_one_is_named() -> None:
    tokenizer = train_bpe([p.prompt + p.answer for p in arithmetic(12)], 20)
    config = small_config()
    encode = encoder(tokenizer, config.task)
    _, ids = encode_all(split(arithmetic(12), 1, 0), encode, config, len(tokenizer), Silent())
    assert tokenizer.decode(ids["3+12"]) == "3+12="
    assert len(ids) == 169
    for encoded, message in (((6,), r"'0\+0': .* must be in 0\.\.5"), ((), r"'0\+0': empty prompt")):
        with pytest.raises(UserError, match=f"^prompt {message}"):
            encode_all(Split(tuple(arithmetic(12)), ()), lambda some, e=encoded: [e] * len(some), config, 6, Silent())
    with pytest.raises(UserError, match=r"^prompt 'long': prompt of 19 tokens"):
        encode_all(Split((Problem("long", "+" * 19, ""),), ()), encode, config, len(tokenizer), Silent())


def chat_tokenizer() -> Any:
    tokenizer = train_bpe(["ab<>|/;usaSB"], 30)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'][0] }}|{{ m['content'] }}>{% endfor %}"
        "{% if add_generation_prompt %}<a|{% endif %}"
    )
    return tokenizer


def test_prompts_are_texts_or_lists_of_messages_in_a_chat_template(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    chat = [{"role": r, "content": c} for r, c in (("user", "ab"), ("assistant", "B"), ("user", "b"))]
    rows = {"prompt": "ab"}, {"prompt": chat}, {"prompt": [{"role": "user", "content": "u"}]}
    problems = read_problems(jsonl(tmp_path, *rows), chat_template=True)
    assert [p.prompt for p in problems] == ["ab", "user: ab\nassistant: B\nuser: b", "u"]
    encode = encoder(tokenizer, of_file(chat_template=True, system_prompt="SB"))
    expected = ["<s|SB><u|ab><a|", "<s|SB><u|ab><a|B><u|b><a|", "<s|SB><u|u><a|"]
    assert [tokenizer.decode(ids) for ids in encode(problems)] == expected
    with pytest.raises(UserError, match=r"p\.jsonl:2: field 'prompt' is a list of messages; chat_template = true re"):
        read_problems(tmp_path / "p.jsonl")
    system = Problem("k", "x", "", messages=json.dumps([{"role": "system", "content": "S"}, *chat]))
    assert tokenizer.decode(encoder(tokenizer, of_file(chat_template=True))([system])[0]).startswith("<s|S><u|ab>")
    with pytest.raises(UserError, match=r"^task\.system_prompt: prompt 'k' has a system message of its own"):
        encode([system])
    assert around_reply(of_file(chat_template=True), tokenizer) == ("><u|", "><a|")


def test_a_template_that_is_missing_or_leaves_something_out_is_refused() -> None:
    tokenizer = chat_tokenizer()
    encode = encoder(tokenizer, of_file(chat_template=True, system_prompt="SB"))
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(UserError, match=r"^task\.system_prompt: this tokenizer's chat template leaves it out"):
        encode([Problem("k", "ab", "")])
    with pytest.raises(UserError, match="leaves turns out"):
        around_reply(of_file(chat_template=True), tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no system turn') }}"
    with pytest.raises(UserError, match=r"template cannot render a chat \(TemplateError: no system turn"):
        encode([Problem("k", "ab", "")])
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="this tokenizer has no chat template; set it to false"):
        encoder(tokenizer, of_file(chat_template=True))


def python_task(folder: Path, text: str) -> PythonTask:
    (folder / "task.py").write_text(text)
    return PythonTask(kind="python", path=str(folder / "task.py"), num_eval_prompts=2)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("def prompts():\n    return [{'prompt': 'a'}, 3]\n", "returned a int as entry 1; must be a dict"),
        ("def prompts():\n    return [{'prompt': 'a'}, {'prompt': 'a'}]\n", "key 'a' is also that of entry 0"),
        ("def prompts():\n    return [{'prompt': 'a', 'of': {1, 2}}]\n", "returned in entry 0 what JSON does not have"),
        ("def prompts():\n    return 'abc'\n", "prompts returned a str; must be a list, with a dict for each prompt"),
        ("def prompts():\n    return 1 / 0\n", "task.py:2: prompts raised ZeroDivisionError"),
        ("import random\ndef prompts():\n    return [{'prompt': str(random.random())}]\n", "returned other prompts"),
        ("prompts = 3\n", "prompts is no function"),
    ],
)
def test_prompts_of_a_python_task_that_are_wrong_are_named(prompts: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^task\\.path: .*{message}"):
        load_source(python_task(tmp_path, prompts), 0)


def test_a_template_makes_prompts_of_any_fields_and_a_second_file_has_the_held_out_ones(tmp_path: Path) -> None:
    lines = [{"q": f"{n}+1?", "nums": [n, 1], "answer": str(n)} for n in range(5)]
    jsonl(tmp_path, *lines).rename(tmp_path / "train.jsonl")
    jsonl(tmp_path, {"q": "8+1?", "nums": [], "answer": ""}, {"q": "9+1?", "nums": [9], "answer": ""})
    files = {"path": str(tmp_path / "train.jsonl"), "eval_path": str(tmp_path / "p.jsonl")}
    task = JsonlTask(kind="jsonl", prompt_template="{q} {nums} {}", num_eval_prompts=2, **files)
    problems = load_source(task, 0).problems
    assert {p.prompt for p in problems.train} == {f"{n}+1? [{n}, 1] {{}}" for n in range(5)}
    assert {p.prompt for p in problems.held_out} == {"8+1? [] {}", "9+1? [9] {}"}
    assert json.loads(problems.train[0].fields).keys() == {"q", "nums"}
    one = load_source(task.model_copy(update={"num_eval_prompts": 1}), 0).problems
    assert one.held_out == problems.held_out[:1]
    assert one.train == problems.train
    with pytest.raises(UserError, match=r"task.num_eval_prompts = 3: .*p.jsonl has 2"):
        load_source(task.model_copy(update={"num_eval_prompts": 3}), 0)
    with pytest.raises(UserError, match=r"jsonl:1: task.prompt_template asks for \{a\}; the line has q, nums, answer"):
        read_problems(tmp_path / "p.jsonl", template="{a}")
    jsonl(tmp_path, lines[3])
    with pytest.raises(UserError, match=r"p.jsonl: key '3\+1\? \[3, 1\] \{\}' is also that of .*train.jsonl"):
        load_source(task, 0)


def test_a_template_without_a_field_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prompt_template must have \{NAME\} for a field NAME of a line"):
        of_file(prompt_template="How much?")
