"""Files of prompts as people have them: verl's Parquet, prompts that are too long, end tokens, very many prompts."""

from __future__ import annotations

import datetime
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from ppo_repro.base.parquet_rows import is_parquet
from ppo_repro.base.watcher import Watcher
from ppo_repro.records import reader
from ppo_repro.tasks import templates, tokenizer
from ppo_repro.tasks.problems import Problem, Split
from ppo_repro.tasks.templates import encode_all, encoder
from ppo_repro.tasks.tokenizer import character_tokenizer
from tests.support.chat import chat_tree, make_chat_folder, write_tree
from tests.support.cli import Cli
from tests.support.json_lines import write_lines
from tests.support.runs import run_below, small_config

LINES = {"kind": "jsonl", "path": "p.jsonl", "chat_template": False}
EXACT = {"kind": "exact_match"}
# as in verl's examples of GSM8K
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert data_source == "openai/gsm8k" and extra_info["index"] < 9 and extra_info["split"] == "train"
    return float(ground_truth in solution_str)
"""


def test_parquet_and_reward_of_verl_are_taken_as_they_are(cli: Cli, tmp_path: Path, model: Path) -> None:
    verl_rows = [
        {
            "data_source": "openai/gsm8k",
            # the null as in data sets of which some messages have the key
            "prompt": [{"role": "user", "content": "ab" * n, "tool_calls": None}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "ab"[n % 2]},
            "extra_info": {"index": n, "split": "train"},
        }
        for n in range(1, 9)
    ]
    pq.write_table(pa.Table.from_pylist(verl_rows), tmp_path / "train.parquet")
    assert is_parquet(Path(shutil.copy(tmp_path / "train.parquet", tmp_path / "train.jsonl")))
    (tmp_path / "r.py").write_text(VERL)
    reward = {"kind": "verl", "path": "r.py:compute_score"}
    config = write_tree(tmp_path, chat_tree(model, {"kind": "jsonl", "path": "train.parquet"}, reward))
    cli.done("run", config, "--out", tmp_path / "runs")
    rows = reader.read_sequences(run_below(tmp_path / "runs"))
    assert rows["answer"].tolist() == ["ab"[(len(prompt) // 2) % 2] for prompt in rows["prompt"]]
    found = [answer in response for answer, response in zip(rows["answer"], rows["response"], strict=True)]
    assert rows["scores"].tolist() == [float(x) for x in found]
    assert 0 < sum(found) < len(found)
    cli.done("rerun", run_below(tmp_path / "runs"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "ab", "day": datetime.date(2026, 1, 1)}], "row 1: column 'day' has what JSON does not have"),
        ([{"prompt": "ab"}, {"prompt": None}], "row 2: field 'prompt' is missing or null"),
        ([{"prompt": "ab", "reward_model": {"ground_truth": 3}}], "row 1: field 'reward_model.ground_truth' = 3; must"),
        ([], "has no rows"),
        (None, "cannot be read"),
    ],
)
def test_what_is_wrong_in_parquet_is_named(
    cli: Cli, tmp_path: Path, model: Path, rows: list[dict[str, Any]] | None, message: str
) -> None:
    path = tmp_path / "p.parquet"
    if rows is None:
        path.write_bytes(b"PAR1")
    else:
        pq.write_table(pa.Table.from_pylist(rows, schema=None if rows else pa.schema([("prompt", pa.string())])), path)
    config = write_tree(tmp_path, chat_tree(model, {**LINES, "path": "p.parquet"}, EXACT))
    assert message in cli.refusal("run", config, "--out", tmp_path / "runs")


def long_prompts(folder: Path, model: Path) -> Path:
    """Nine prompts of 1 to 4 tokens and three of 60; the context has room for 28."""
    texts = ["ab " * n for n in range(1, 10)] + [f"{'ab' * 30}{'u' * n}" for n in range(3)]
    write_lines(folder / "p.jsonl", [{"prompt": text, "answer": "a"} for text in texts])
    return write_tree(folder, chat_tree(model, LINES, EXACT))


def test_prompts_that_are_too_long_end_the_run_or_are_counted(cli: Cli, tmp_path: Path, model: Path) -> None:
    config, out = long_prompts(tmp_path, model), tmp_path / "runs"
    said = cli.refusal("run", config, "--out", out)
    assert "exceeds numerics.max_context = 40; " in said
    assert "set task.overlong = drop" in said
    code, _, err = cli("run", config, "--out", out, "--set", "task.overlong=drop")
    assert code == 0, err
    (said,) = (line for line in err.splitlines() if "task.overlong" in line)
    counts = [int(word) for word in said.split() if word.isdecimal()]
    assert counts[0] + counts[2] == 3, said
    assert counts[1] + counts[3] == 12, said
    assert reader.read_sequences(run_below(out))["prompt"].str.len().max() < 30
    assert cli("rerun", run_below(out))[0] == 0
    said = cli.refusal("run", config, "--out", out, "--set", "task.overlong=drop", "--set", "numerics.max_context=13")
    assert "are left out, which numerics.max_context has no room for; raise it" in said


@pytest.mark.parametrize("template", [False, True])
def test_an_end_token_that_ends_prompts_is_named_once(cli: Cli, tmp_path: Path, model: Path, template: bool) -> None:
    """As add_eos_token does, or a template that does not begin the model's turn."""
    own = make_chat_folder(tmp_path / "model", "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}")
    if not template:
        made = AutoTokenizer.from_pretrained(own)
        made.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
        made.save_pretrained(own)
    write_lines(tmp_path / "p.jsonl", [{"prompt": "ab" * n, "answer": "a"} for n in range(1, 9)])
    tree = chat_tree(own, {**LINES, "chat_template": template}, EXACT)
    code, _, err = cli("run", write_tree(tmp_path, tree), "--out", tmp_path / "runs")
    assert code == 0, err
    (said,) = (line for line in err.splitlines() if line.startswith("warning: ") and "end with the end token" in line)
    assert "8 of 8 prompts end with the end token '<eos>'" in said
    assert ("add_generation_prompt" if template else "add_eos_token") in said


def test_sampled_ids_that_the_tokenizer_lacks_are_named_once(cli: Cli, tmp_path: Path) -> None:
    """The control has a tokenizer for every row of its model."""
    write_lines(tmp_path / "p.jsonl", [{"prompt": "ab" * n, "answer": "a"} for n in range(1, 9)])
    for rows, lines in ((5, 1), (0, 0)):
        own = make_chat_folder(tmp_path / f"model{rows}", rows=rows)
        tree = chat_tree(own, LINES, EXACT)
        tree["ppo"]["iterations"] = 2
        code, _, err = cli("run", write_tree(tmp_path, tree), "--out", tmp_path / f"runs{rows}")
        assert code == 0, err
        said = [line for line in err.splitlines() if "sampled tokens have ids that the tokenizer lacks" in line]
        assert len(said) == lines, err


class Seen(Watcher):
    def __init__(self) -> None:
        self.lines: list[tuple[int, int]] = []

    def step(self, name: str, done: int, total: int, figures: str) -> None:
        self.lines.append((done, total))


def test_very_many_prompts_are_encoded_together_and_with_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be asked once of a tokenizer is asked once, however many prompts there are."""
    made = character_tokenizer(["0123456789+="])
    asked: list[str] = []

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            asked.append(name)
            return function(*arguments, **more)

        return call

    for name in ("special_tokens", "all_token_ids"):
        monkeypatch.setattr(tokenizer, name, counted(name, getattr(tokenizer, name)))
    config, seen = small_config(), Seen()
    problems = Split(tuple(Problem(str(i), f"{i}+1=", "") for i in range(9_000)), (Problem("x", "1+1=", ""),))
    _, ids = encode_all(problems, encoder(made, config.task), config, len(made), seen)
    assert len(ids) == 9_001
    assert made.decode(ids["8999"]) == "8999+1="
    chunks = -(-9_001 // templates.AT_ONCE)
    assert asked.count("special_tokens") == 1
    assert asked.count("all_token_ids") == chunks
    assert len(seen.lines) == chunks
    assert seen.lines[-1] == (9_001, 9_001)


COMPARES = " alone and .* others, and a run gives it one completion at a time; .* score[(][)] of a task of kind python"
REPEATS = "returned .* for the same input"
WRITTEN = 'text not in ("", "a") and text.replace("ab ", "")'  # by the model; the start of a run has other texts


@pytest.mark.parametrize(
    ("kind", "lines", "said"),
    [
        ("trl", "return [sorted(map(len, completions)).index(len(c)) for c in completions]", COMPARES),
        ("trl", "return [1 / completions.count(text) for text in completions]", COMPARES),
        (
            "trl",
            f"best = max((text for text in completions if {WRITTEN}), default='')\n"
            "    return [float(text == best != '') for text in completions]",
            COMPARES,
        ),
        ("function", f"text = response; seen.append(0); return len(seen) if {WRITTEN} else 0", REPEATS),
    ],
)
def test_a_reward_that_follows_from_more_than_the_response_is_refused(
    cli: Cli, tmp_path: Path, model: Path, kind: str, lines: str, said: str
) -> None:
    signature = "completions, **_" if kind == "trl" else "response"
    rows = [{"prompt": "ab " * n, "answer": "a"} for n in range(1, 9)]
    assert re.search(said, refusal(cli, tmp_path, model, kind, f"seen = []\ndef f({signature}):\n    {lines}", rows))


@pytest.mark.parametrize(
    ("kind", "signature"),
    [("trl", "completions, answer, **_"), ("function", "response, answer"), ("function", "response, ground_truth")],
)
def test_no_reward_asks_for_missing_answers(cli: Cli, tmp_path: Path, model: Path, kind: str, signature: str) -> None:
    rows = [{"prompt": "ab " * n, "level": n} for n in range(1, 9)]
    said = refusal(cli, tmp_path, model, kind, f"def f({signature}): return [0.0]", rows)
    assert f"f asks for '{signature.split(', ')[1]}', and no prompt of the task has one;" in said


def refusal(cli: Cli, folder: Path, model: Path, kind: str, reward: str, rows: list[dict[str, Any]]) -> str:
    """The line with which a run on these prompts refuses the function f of a reward."""
    (folder / "r.py").write_text(reward)
    write_lines(folder / "p.jsonl", rows)
    config = write_tree(folder, chat_tree(model, LINES, {"kind": kind, "path": "r.py:f"}))
    return cli.refusal("run", config, "--out", folder / "runs")


def test_a_verifier_that_gives_a_response_two_scores_is_refused(cli: Cli, tmp_path: Path, model: Path) -> None:
    (tmp_path / "task.py").write_text(
        "seen = []\n"
        "def prompts(): return [{'prompt': 'ab ' * n, 'answer': 'a'} for n in range(1, 9)]\n"
        "def score(transcripts):\n"
        "    seen.append(0)\n"
        f"    return [len(seen) if {WRITTEN} else 0 for text in (t.text for t in transcripts)]\n"
    )
    tree = chat_tree(model, {"kind": "python", "path": "task.py", "chat_template": False}, {"kind": "verifier"})
    assert re.search(REPEATS, cli.refusal("run", write_tree(tmp_path, tree), "--out", tmp_path / "runs"))
