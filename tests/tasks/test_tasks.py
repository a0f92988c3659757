"""Problems, their split and order, and the verifiers, the user's own included."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.config.reward import RewardConfig
from ppo_repro.config.tasks import ArithmeticTask, JsonlTask
from ppo_repro.errors import UserError
from ppo_repro.tasks.answers import matches
from ppo_repro.tasks.problems import (
    Problem,
    arithmetic,
    choose,
    encode_all,
    encoder,
    read_jsonl,
    split,
)
from ppo_repro.tasks.rewards import (
    Judge,
    Judgement,
    Samples,
    formatted_answer,
    judge_samples,
    load_judge,
    reward_files,
)
from ppo_repro.tasks.sources import load_source
from ppo_repro.tasks.tokenizer import train_bpe
from tests.support.runs import small_config


def numbered(count: int) -> list[Problem]:
    return [Problem(f"k{i}", f"p{i}", f"a{i}") for i in range(count)]


def jsonl(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines), encoding="utf-8")
    return path


def test_arithmetic_is_every_addition_once() -> None:
    assert arithmetic(1) == [
        Problem("0+0", "0+0=", "0"),
        Problem("0+1", "0+1=", "1"),
        Problem("1+0", "1+0=", "1"),
        Problem("1+1", "1+1=", "2"),
    ]
    found = arithmetic(30)
    assert len(found) == len({p.key for p in found}) == 31 * 31
    for problem in found:
        a, b = problem.prompt.removesuffix("=").split("+")
        assert int(a) + int(b) == int(problem.answer)


@given(st.integers(2, 40), st.integers(0, 2**63 - 1), st.randoms(use_true_random=False), st.data())
def test_a_split_is_disjoint_complete_and_blind_to_the_order(count: int, seed: int, random, data) -> None:
    problems = numbered(count)
    held_out = data.draw(st.integers(1, count - 1))
    found = split(problems, held_out, seed)
    assert len(found.held_out) == held_out
    assert Counter(found.train + found.held_out) == Counter(problems)
    assert split(random.sample(problems, count), held_out, seed) == found


def test_a_split_depends_on_the_seed_and_not_on_prompts_or_answers() -> None:
    held_out = {tuple(p.key for p in split(numbered(50), 10, seed).held_out) for seed in range(20)}
    assert len(held_out) == 20
    reworded = [Problem(p.key, "x" + p.prompt, "y") for p in numbered(50)]
    assert [p.key for p in split(reworded, 10, 3).train] == [p.key for p in split(numbered(50), 10, 3).train]


@pytest.mark.parametrize("count", [0, 3, 4])
def test_a_split_leaves_something_to_train_on(count: int) -> None:
    message = f"task.num_eval_prompts = 4: there are {count} prompts; leave some to train on"
    with pytest.raises(UserError, match=message):
        split(numbered(count), 4, 0)


def test_problems_of_both_tasks(tmp_path: Path) -> None:
    task = ArithmeticTask(kind="arithmetic", max_operand=4, num_eval_prompts=5)
    assert load_source(task, 3).problems == split(arithmetic(4), 5, 3)
    path = jsonl(tmp_path, *({"prompt": p.prompt, "answer": p.answer, "key": p.key} for p in numbered(6)))
    jsonl_task = JsonlTask(kind="jsonl", path=str(path), num_eval_prompts=2)
    assert load_source(jsonl_task, 3).problems == split(numbered(6), 2, 3)


def test_jsonl_keeps_texts_and_uses_the_prompt_as_key(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a b", "answer": ""}, "  ", {"prompt": "é", "answer": "1", "key": "k", "more": 3})
    assert read_jsonl(path) == [Problem("a b", "a b", ""), Problem("k", "é", "1", '{"more": 3}')]
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert [p.key for p in read_jsonl(path)] == ["a b", "k"]


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1), st.booleans())
def test_jsonl_reads_any_text(tmp_path_factory: pytest.TempPathFactory, text: str, escaped: bool) -> None:
    """Also U+2028, U+0085 and others that cut a text into lines elsewhere but may stand in JSON as they are."""
    line = json.dumps({"prompt": text, "answer": text}, ensure_ascii=escaped)
    assert read_jsonl(jsonl(tmp_path_factory.mktemp("text"), line)) == [Problem(text, text, text)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be an object, is list"),
        ('"x"', "must be an object, is str"),
        ('{"prompt": "x"}', "field 'answer' is missing or null; must be a text"),
        ('{"answer": "x"}', "field 'prompt' is missing or null; must be a text"),
        ('{"prompt": "x", "answer": 3}', "field 'answer' = 3; must be a text"),
        ('{"prompt": "", "answer": "x"}', "field 'prompt' is empty"),
        ('{"prompt": "x", "answer": "x", "key": 3}', "field 'key' = 3; must be a text"),
        ('{"prompt": "x", "answer": "x", "key": ""}', "field 'key' is empty"),
        (
            '{"prompt": "x\\ud800", "answer": "x"}',
            "field 'prompt' has half of a surrogate pair (\\ud800) at",
        ),
        (
            '{"prompt": "x", "answer": "\\udfff"}',
            "field 'answer' has half of a surrogate pair (\\udfff) at",
        ),
        ('{"prompt": "x", "answer": "x", "key": "\\udc00"}', "field 'key' has half of a surrogate pair"),
        ('{"prompt": "x", "answer": "a\\u0000"}', "field 'answer' has the character NUL (\\u0000) at character 2"),
        ('{"prompt": "x", "answer": "x", "other": NaN}', "NaN is no JSON"),
        ('{"prompt": "fine", "answer": "x", "key": "k"}', "prompt 'fine' is also that of line 1"),
        ('{"prompt": "x", "answer": "x", "key": "fine"}', "key 'fine' is also that of line 1"),
    ],
)
def test_a_mistake_in_jsonl_is_named_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = jsonl(tmp_path, {"prompt": "fine", "answer": "1"}, "", line)
    with pytest.raises(UserError) as caught:
        read_jsonl(path)
    assert str(caught.value).startswith(f"{path}:3: {message}")


def test_a_jsonl_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task.path = .*absent: cannot be read \(No such file or directory\)"):
        read_jsonl(tmp_path / "absent")
    for content in (b"", b"\n \n", b"\xef\xbb\xbf\n"):
        (tmp_path / "empty").write_bytes(content)
        with pytest.raises(UserError, match=r"task\.path = .*empty: is empty; give one JSON object per line"):
            read_jsonl(tmp_path / "empty")


@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 2**63 - 1))
def test_every_problem_comes_once_per_epoch(problems: int, count: int, seed: int) -> None:
    pool = tuple(numbered(problems))
    iterations = -(-3 * problems // count)
    chosen = [choose(pool, count, seed, i) for i in range(iterations)]
    assert all(len(part) == count for part in chosen)
    flat = [p for part in chosen for p in part]
    for epoch in range(3):
        assert Counter(flat[epoch * problems : (epoch + 1) * problems]) == Counter(pool)


def test_epochs_and_seeds_have_their_own_order() -> None:
    pool = tuple(numbered(20))
    orders = {tuple(choose(pool, 20, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert choose(pool, 20, 3, 4) == choose(pool, 20, 3, 4)


def test_prompts_become_ids_and_the_unservable_one_is_named() -> None:
    tokenizer = train_bpe([p.prompt + p.answer for p in arithmetic(12)], 20)
    config = small_config()
    encode = encoder(tokenizer, chat_template=False)
    ids = encode_all(arithmetic(12), encode, config, len(tokenizer))
    assert tokenizer.decode(ids["3+12"]) == "3+12=" and len(ids) == 169
    with pytest.raises(UserError, match=r"^prompt '0\+0': .* must be in 0\.\.5"):
        encode_all(arithmetic(12), lambda _: (6,), config, 6)
    with pytest.raises(UserError, match=r"^prompt '0\+0': empty prompt"):
        encode_all(arithmetic(12), lambda _: (), config, 6)
    with pytest.raises(UserError, match=r"^prompt 'long': prompt of 19 tokens"):
        encode_all([Problem("long", "+" * 19, "")], encode, config, len(tokenizer))
    assert len(encode_all([Problem("fits", "+" * 18, "")], encode, config, len(tokenizer))["fits"]) == 18


def test_a_chat_template_is_asked_for_and_used() -> None:
    tokenizer = train_bpe(["<a>bc"], 20)
    with pytest.raises(UserError, match="this tokenizer has no chat template; set it to false"):
        encoder(tokenizer, chat_template=True)
    tokenizer.chat_template = "<{{ messages[0]['content'] }}>{% if add_generation_prompt %}c{% endif %}"
    ids = encoder(tokenizer, chat_template=True)(Problem("k", "ab", ""))
    assert tokenizer.decode(ids) == "<ab>c"


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("12", "12", True),
        (" 12\n", "12", True),
        ("12", " 12", True),
        ("1 2", "12", False),
        ("", "", True),
        ("112", "12", False),
    ],
)
def test_a_match_ignores_surrounding_white_space_alone(response: str, answer: str, expected: bool) -> None:
    assert matches(response, answer) is expected


def config_of(*terms: dict[str, Any], **other: Any) -> RewardConfig:
    return RewardConfig.model_validate({"terms": terms or ({"kind": "exact_match"},), **other})


def judged(judge: Judge, rows: list[tuple[str, str, str, bool]], model_scores: list[float] | None = None) -> Judgement:
    """Of (prompt, response, answer, finished) each; a response has as many tokens as characters."""
    prompts, responses, answers, finished = (list(column) for column in zip(*rows, strict=True))
    samples = Samples(prompts, prompts, responses, answers, finished, [len(r) for r in responses])
    return judge_samples(judge, samples, model_scores or [])


def test_exact_match_needs_the_answer_and_an_end() -> None:
    rows = [("p", "12", "12", True), ("p", "12", "12", False), ("p", "13", "12", True), ("p", "13", "12", False)]
    found = judged(load_judge(config_of()), rows)
    assert found == Judgement([1.0, 0.0, 0.0, 0.0], [[1.0], [0.0], [0.0], [0.0]], [True, False, False, False])


@pytest.mark.parametrize("weights", [[1e39], [1e308, 1e308], [-1e39]])
def test_a_score_beyond_float32_is_the_users_mistake(weights: list[float]) -> None:
    judge = load_judge(config_of(*({"kind": "exact_match", "weight": weight} for weight in weights)))
    assert judged(judge, [("p", "r", "a", True)]).scores == [0.0]
    with pytest.raises(UserError, match=r"reward: the score .* for prompt key 'p' is beyond float32 \(3\.4e\+38\)"):
        judged(judge, [("p", "a", "a", True)])


def test_terms_are_weighted_and_recorded_unweighted() -> None:
    # exact 1, format 0; length |2 - 4| / 4 = 0.5; 2 * 1 + 3 * 0 - 10 * 0.5
    terms = ({"kind": "exact_match", "weight": 2.0}, {"kind": "format", "weight": 3.0})
    judge = load_judge(config_of(*terms, {"kind": "length", "weight": 10.0, "target": 4}))
    found = judged(judge, [("p", "12", "12", True)])
    assert found.scores == [-3.0] and found.term_values == [[1.0, 0.0, -0.5]]


GOOD = "<think>7+5</think> <answer>12</answer>"


@pytest.mark.parametrize(
    ("response", "inner"),
    [
        (GOOD, "12"),
        (f" {GOOD}\n", "12"),
        ("<think></think><answer></answer>", ""),
        ("<think>a\nb</think>\n<answer> 1\n2 </answer>", " 1\n2 "),
        (f"so {GOOD}", None),
        (f"{GOOD} so", None),
        (f"{GOOD}{GOOD}", None),
        ("<answer>12</answer>", None),
        ("<think>7</think>", None),
        ("<think><think>7</think></think><answer>12</answer>", None),
        ("<think>7</think><answer><answer>12</answer></answer>", None),
        ("<answer>12</answer><think>7</think>", None),
        ("<think>7</think><answer>12", None),
        ("", None),
    ],
)
def test_the_format_is_thoughts_then_answer_and_nothing_else(response: str, inner: str | None) -> None:
    assert formatted_answer(response) == inner


def test_a_format_pays_for_the_form_and_for_the_answer_in_it() -> None:
    judge = load_judge(config_of({"kind": "format"}))
    wrong, bare = GOOD.replace("12", "13"), "12"
    found = judged(judge, [("p", GOOD, "12", True), ("p", wrong, "12", True), ("p", bare, "12", True)])
    assert found.scores == [2.0, 1.0, 0.0]
    assert found.correct == [True, False, True], "without the form the response itself is compared"


def test_responses_without_an_end_are_charged() -> None:
    rows = [("p", "12", "12", False), ("p", "12", "12", True)]
    term = {"kind": "length", "target": 4}
    assert judged(load_judge(config_of(term)), rows).scores == [-0.5, -0.5]
    assert judged(load_judge(config_of(term, missing_eos_penalty=2.0)), rows).scores == [-2.5, -0.5]


def test_a_reward_model_is_one_term_among_others() -> None:
    judge = load_judge(config_of({"kind": "model", "path": "m", "weight": 0.5}, {"kind": "exact_match"}))
    found = judged(judge, [("p", "12", "12", True), ("p", "1", "12", True)], [4.0, -2.0])
    assert found.scores == [3.0, -1.0] and found.term_values == [[4.0, 1.0], [-2.0, 0.0]]


def user_file(tmp_path: Path, text: str, name: str = "f") -> str:
    (tmp_path / "r.py").write_text(text, encoding="utf-8")
    return f"{tmp_path / 'r.py'}:{name}"


def function_of(path: str) -> RewardConfig:
    return config_of({"kind": "function", "path": path})


def test_a_user_reward_is_called_with_prompt_response_and_answer(tmp_path: Path) -> None:
    config = function_of(
        user_file(
            tmp_path, "def f(prompt, response, answer):\n    return len(prompt) + 10 * len(response) - len(answer)"
        )
    )
    assert reward_files(config) == [tmp_path / "r.py"]
    found = judged(load_judge(config), [("ab", "", "xyz", True), ("a", "x", "x", True)])
    assert found.scores == [-1.0, 10.0] and all(type(s) is float for s in found.scores)
    assert found.correct == [False, True], "correctness is a match, whatever the reward says"


def test_exact_match_has_no_file() -> None:
    assert reward_files(config_of()) == [] and load_judge(config_of()).functions == (None,)


def test_two_functions_of_one_name_are_two(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "r.py").write_text(f"def f(*_): return {value}")
    terms = [{"kind": "function", "path": f"{tmp_path}/{name}/r.py:f"} for name in ("a", "b")]
    assert judged(load_judge(config_of(*terms)), [("p", "r", "a", True)]).term_values == [[1.0, 2.0]]


def test_a_user_file_may_hold_dataclasses_with_postponed_annotations(tmp_path: Path) -> None:
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    text += "@dataclass\nclass Score:\n    value: float\ndef f(*_): return Score(0.5).value\n"
    assert judged(load_judge(function_of(user_file(tmp_path, text))), [("p", "r", "a", True)]).scores == [0.5]


@pytest.mark.parametrize("reward", ["exact", "r.py", "r.py:", "r.txt:f", "r.py:1f", ":f", "r.py:f.g"])
def test_a_reward_of_another_form_is_refused(reward: str) -> None:
    for use in (load_judge, reward_files):
        with pytest.raises(UserError, match=r"reward\.terms\.0\.path = .*: must be FILE\.py:FUNCTION"):
            use(function_of(reward))


def test_a_user_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no file .*absent\.py"):
        load_judge(function_of(f"{tmp_path / 'absent.py'}:f"))
    with pytest.raises(UserError, match=r"r\.py has no function g"):
        load_judge(function_of(user_file(tmp_path, "def f(*_): return 1.0", "g")))
    with pytest.raises(UserError, match=r"has no function f"):
        load_judge(function_of(user_file(tmp_path, "f = 3  # not a function")))
