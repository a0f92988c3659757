"""What goes wrong between the turns of an episode is one line; templates and control tokens are named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from ppo_repro.config.files import dump_yaml, load_config
from ppo_repro.errors import UserError
from ppo_repro.runs import prepare
from ppo_repro.tasks.dialogue import Conversations
from ppo_repro.tasks.problems import Problem
from ppo_repro.tasks.tokenizer import spelled_tokens, train_bpe
from tests.support.cli import Cli, one_line
from tests.support.paths import TINY
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
    config = turns_config(
        tmp_path, "model.warm_start_steps=0", "ppo.iterations=1", "rollout.stop=['=', '+', '1']", task=task
    )
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    code, _, err = cli("run", tmp_path / "run.yaml", "--out", tmp_path / "out")
    assert code == 2 and re.search(message, one_line(err)), err


@pytest.mark.parametrize(
    ("task", "max_turns", "message"),
    [
        (TASK, 1, "task.max_turns = 1: .*task.py has a function step, which needs at least 2 turns; raise it"),
        (TASK.replace("def step", "def stop"), 2, "task.max_turns = 2: .*task.py has no function step"),
        (TASK.replace("def score", "def rate"), 3, "task.path: .*task.py has no function score"),
        (
            TASK.replace("return [(t", "return [None for t in transcripts] or [(t"),
            3,
            "score returned None; must be a finite number",
        ),
        (TASK.replace("for t in transcripts]", "for t in transcripts[1:]]"), 3, "score returned 3 numbers for 4"),
    ],
)
def test_a_file_that_is_wrong_is_named(task: str, max_turns: int, message: str, tmp_path: Path) -> None:
    config = turns_config(tmp_path, task=task, max_turns=max_turns)
    with pytest.raises(UserError, match=message):
        prepare.prepare(config, lambda step, total, loss: None)


def test_sglang_refuses_turns_and_stop_texts_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task\.max_turns greater than 1 needs rollout\.engine\.kind = torch"):
        turns_config(tmp_path, "rollout.engine.kind=sglang", "rollout.stop=[]")
    with pytest.raises(UserError, match=r"rollout\.stop needs rollout\.engine\.kind = torch"):
        load_config(TINY, ["rollout.engine.kind=sglang", "rollout.stop=['=']"])


class Said:
    """An environment that answers every turn with one text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.step = self
        self.where = "task.path: task.py:1"

    def next_turn(self, transcript: dict[str, Any]) -> str:
        return self.text


def conversations(text: str, folder: Path, *overrides: str, spelled: tuple[str, ...] = ()) -> Conversations:
    """One conversation with a tokenizer whose template trims what is said, as that of Llama 3 does."""
    tokenizer = train_bpe(["ab1 <>|/;usaS"], 40)
    tokenizer.add_tokens([AddedToken("<tool>", special=True)])
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'][0] }}|{{ m['content'] | trim }}>{% endfor %}"
        "{% if add_generation_prompt %}<a|{% endif %}"
    )
    config = turns_config(folder, *overrides)
    config = config.model_copy(update={"task": config.task.model_copy(update={"chat_template": True})})
    problems = [Problem("k", "ab", "")]
    return Conversations(config, tokenizer, spelled_tokens(tokenizer, spelled), Said(text), problems)  # type: ignore[arg-type]


def test_a_template_that_trims_a_text_is_named_once_with_both_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, lines in ((" b ", 1), ("b", 0)):
        talk = conversations(text, tmp_path)
        turn = talk.tokenizer("a1", add_special_tokens=False)["input_ids"]
        assert talk.reply(0, [turn]) and talk.reply(0, [turn, turn])
        said = capsys.readouterr().err
        assert said.count("warning: task.chat_template: for prompt key 'k' the tokens of the episode read") == lines
        assert not lines or ("'a1><u| b ><a|' where" in said and "has 'a1><u|b><a|'" in said)


def test_control_tokens_in_what_an_environment_says_are_refused_unless_they_are_allowed(tmp_path: Path) -> None:
    turn = [5]
    with pytest.raises(UserError, match=r"step returned a text for prompt key 'k' that contains '<tool>', which the"):
        conversations("a<tool>", tmp_path).reply(0, [turn])
    assert conversations("a<tool>", tmp_path, "task.control_tokens=allow").reply(0, [turn])


def test_a_stop_text_that_is_a_special_token_ends_a_turn(tmp_path: Path) -> None:
    for spelled, ends in (("<tool>",), True), ((), False):
        talk = conversations("a", tmp_path, "rollout.stop=['<tool>']", spelled=spelled)
        assert talk.ends([5, talk.tokenizer.convert_tokens_to_ids("<tool>")]) is ends
