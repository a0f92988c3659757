"""What a reward judges, seen in recorded runs: the model's own words, special tokens where a reward asks for them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from ppo_repro.config.files import dump_yaml
from ppo_repro.records import reader
from tests.support.chat import chat_tree, write_tree
from tests.support.cli import Cli
from tests.support.json_lines import write_lines
from tests.support.runs import run_below
from tests.support.turns import turns_config

RIGHT = "<answer>RIGHT</answer>"
ENVIRONMENT = f"""
def prompts(): return [{{"prompt": "</answer>" + ":" * i, "answer": "RIGHT", "key": str(i)}} for i in range(1, 9)]
def step(transcript): return "{RIGHT}" if len(transcript.turns) == 1 else None
def score(transcripts): return [float("<answer>RIGHT" in t.own) for t in transcripts]
"""
REWARDS = """
def own(prompt, response, answer): return float("<answer>RIGHT" in response)
def trl(completions, **_): return [float("<answer>RIGHT" in c) for c in completions]
def verl(data_source, solution_str, ground_truth, extra_info): return float("<answer>RIGHT" in solution_str)
def whole(prompt, response, answer, turns): return float(any("<answer>RIGHT" in t.text for t in turns))
def tagged(prompt, response): return float("<answer>" in response)
"""
TERMS = (("verifier", ""), ("function", "own"), ("trl", "trl"), ("verl", "verl"), ("function", "whole"))


def test_no_reward_judges_what_the_environment_says(tmp_path: Path, cli: Cli) -> None:
    """A random model, and an environment that gives the answer away; the control asks for the environment's turn."""
    (tmp_path / "r.py").write_text(REWARDS)
    terms = ["{kind: exact_match}"]
    terms += [f"{{kind: {kind}{f', path: {tmp_path}/r.py:{name}' if name else ''}}}" for kind, name in TERMS]
    overrides = (
        "task.answer_extraction=answer_tags", "model.warm_start_steps=0", "model.vocab_size=60", "ppo.iterations=1",
        "model.tokenizer=characters",
        "rollout.stop=['I', 'R', ':']", "rollout.max_response_tokens=40", "numerics.max_context=64",
        f"reward.terms=[{', '.join(terms)}]",
    )  # fmt: skip
    (tmp_path / "run.yaml").write_text(dump_yaml(turns_config(tmp_path, *overrides, task=ENVIRONMENT)))
    summary = cli.json("run", tmp_path / "run.yaml", "--out", tmp_path)
    assert summary["accuracy_before"] == summary["accuracy_after"] == 0.0
    rows = reader.read_sequences(summary["run_dir"])
    spoke = rows["is_forced"].map(max) > 0
    assert spoke.sum() > 5
    assert not rows["is_correct"].any()
    parts = [list(row) for row in rows["score_parts"]]
    assert parts == [[0.0] * 5 + [float(forced)] for forced in spoke]


def chat_config(folder: Path, model: Path, task: dict[str, Any], **rollout: Any) -> Path:
    """A run of one iteration whose reward is whether a response has `<answer>`."""
    (folder / "r.py").write_text(REWARDS)
    reward = {"kind": "function", "path": "r.py:tagged"}
    return write_tree(folder, chat_tree(model, task, reward, **rollout))


def messages(folder: Path) -> dict[str, Any]:
    """Prompts as lists of messages, without answers."""
    chats = [[{"role": "user", "content": "ab" * n}] for n in range(1, 9)]
    write_lines(folder / "p.jsonl", [{"prompt": chat} for chat in chats])
    return {"kind": "jsonl", "path": "p.jsonl"}


@pytest.mark.parametrize("asked", [True, False])
def test_special_tokens_are_text_where_something_asks(asked: bool, model: Path, tmp_path: Path, cli: Cli) -> None:
    """Prompts are messages without answers; the control asks for nothing."""
    task = {**messages(tmp_path), **({"answer_extraction": "answer_tags"} if asked else {})}
    config = chat_config(tmp_path, model, task, **({"stop": ["<end>"]} if asked else {}))
    cli.done("run", config, "--out", tmp_path)
    rows = reader.read_sequences(run_below(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(model)
    answer, end = tokenizer.convert_tokens_to_ids(["<answer>", "<end>"])
    has_answer = [answer in ids for ids in rows["response_ids"]]
    assert 0 < sum(has_answer) < len(rows)
    assert rows["scores"].tolist() == [float(asked and has) for has in has_answer]
    ended = [end in ids[:-1] for ids in rows["response_ids"]]
    assert any(ended) is not asked, "no token follows a stop text"


CHAT = """
def prompts(): return [{"prompt": "ab" * i, "key": str(i)} for i in range(1, 9)]
def step(transcript): return " b " if len(transcript.turns) == 1 else None
"""


def test_a_template_that_trims_is_named_once_with_both_texts(model: Path, tmp_path: Path, cli: Cli) -> None:
    for text, lines in (("' b '", 1), ("'b'", 0)):
        (tmp_path / "task.py").write_text(CHAT.replace('" b "', text))
        task = {"kind": "python", "path": "task.py", "max_turns": 2, "answer_extraction": "answer_tags"}
        config = chat_config(tmp_path, model, task, stop=["<end>"])
        code, _, err = cli("run", config, "--out", tmp_path / str(lines))
        assert code == 0, err
        said = [line for line in err.splitlines() if line.startswith("warning: task.chat_template: for prompt key '")]
        assert len(said) == lines, err
        assert all("the tokens of the episode read" in line and "the tokenizer's template has" in line for line in said)


def test_control_tokens_in_prompts_and_turns_are_refused_unless_allowed(model: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"a<end>{'b' * n}"}) + "\n" for n in range(9)))
    config = chat_config(tmp_path, model, {"kind": "jsonl", "path": "p.jsonl"})
    said = cli.refusal("run", config, "--out", tmp_path)
    assert "contains '<end>', which the tokenizer reads as a control token" in said
    cli.done("run", config, "--out", tmp_path, "--set", "task.control_tokens=allow")
    (tmp_path / "task.py").write_text(CHAT.replace('" b "', '"<end>"'))
    task = {"kind": "python", "path": "task.py", "max_turns": 2}
    said = cli.refusal("run", chat_config(tmp_path, model, task), "--out", tmp_path / "turns")
    assert re.search(r"task\.py:3: step returned a text for .* that contains '<end>', which", said)
