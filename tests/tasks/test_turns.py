"""What goes wrong between the turns of an episode is one line; templates and control tokens are named."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.base.watcher import Silent
from ppo_repro.config.files import dump_yaml
from ppo_repro.runs import prepare
from ppo_repro.tasks import dialogue
from ppo_repro.tasks.dialogue import Conversation
from ppo_repro.tasks.problems import Problem
from ppo_repro.tasks.tokenizer import decode, train_bpe
from tests.support.cli import Cli
from tests.support.turns import TASK, turns_config

BAD = {
    "raises": ("    raise ValueError('no\\nway')", r"task\.py:11: step raised ValueError: no way; prompt key '"),
    "no text": ("    return 7", r"step returned 7 of type int; must be a text or None; prompt key '"),
    "an empty text": ("    return ''", r"step returned an empty text; must be None where the episode is over"),
    "for ever": ("    return '1'", r"task\.max_turns = 3: .*task\.py:10: step wants another turn for prompt key '"),
    "too much": ("    return '1' * 50", r"no room in rollout\.max_response_tokens = 14; return less, or raise it"),
    "chance": ("    import random\n    return str(random.random())", r"step returned '0\.\d+' and then '0\.\d+' for"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_step_that_is_wrong_is_one_line(name: str, tmp_path: Path, cli: Cli) -> None:
    body, message = BAD[name]
    before, _, rest = TASK.partition("def step(transcript):\n")
    task = f"{before}def step(transcript):\n{body}\n\n\ndef score{rest.partition('def score')[2]}"
    quick = "model.warm_start_steps=0", "ppo.iterations=1", "rollout.stop=['=', '+', '1']"
    (tmp_path / "run.yaml").write_text(dump_yaml(turns_config(tmp_path, *quick, task=task)))
    assert re.search(message, cli.refusal("run", tmp_path / "run.yaml", "--out", tmp_path / "out"))


@pytest.mark.parametrize(
    ("task", "max_turns", "message"),
    [
        (TASK, 1, "task.max_turns = 1: .*task.py has a function step, which needs at least 2 turns; raise it"),
        (TASK.replace("def step", "def stop"), 2, "task.max_turns = 2: .*task.py has no function step"),
        (TASK.replace("def score", "def rate"), 3, "task.path: .*task.py has no function score"),
        (
            TASK.replace("return [(t", "return [None for t in transcripts] or [(t"),
            3,
            "score returned None of type None",
        ),
        (TASK.replace("for t in transcripts]", "for t in transcripts[1:]]"), 3, "score returned 7 numbers for 8"),
    ],
)
def test_a_file_that_is_wrong_is_named(task: str, max_turns: int, message: str, tmp_path: Path) -> None:
    config = turns_config(tmp_path, task=task, max_turns=max_turns)
    with pytest.raises(UserError, match=message):
        prepare.prepare(config, Silent())


def test_a_stop_text_is_found_without_decoding_a_long_turn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters of several bytes are several tokens, special tokens have no text, and one token has 30 spaces."""
    tokenizer, decoded = train_bpe(["na\u00efve \u2192 \u4e2d\u6587 stop", " " * 60] * 2, 40), list[int]()
    problem = Problem("key", "prompt", "answer")
    environment: Any = SimpleNamespace(stop=("\u4e2d", " \u2192", "op\u00ef"), tokenizer=tokenizer, spelled=frozenset())

    def counted(_: object, ids: Sequence[int], spelled: frozenset[int]) -> str:
        decoded.append(len(ids))
        return decode(tokenizer, ids, spelled)

    monkeypatch.setattr(dialogue, "decode", counted)
    generator, lengths = random.Random(0), list[int]()
    for _ in range(40):
        turn, is_over = list[int](), False
        while not is_over:
            turn.append(generator.randrange(len(tokenizer)))
            is_over = any(one in decode(tokenizer, turn) for one in environment.stop)
            assert Conversation(environment, problem).ends(turn) == is_over
        lengths.append(len(turn))
    assert max(decoded) <= 64 < max(lengths)
