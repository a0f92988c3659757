"""What enters a prompt follows from the inputs of a run: templates with a clock, with chance, with arguments."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from ppo_repro.base.errors import UserError
from ppo_repro.config.files import load_config
from ppo_repro.records import reader
from ppo_repro.tasks import templates
from ppo_repro.tasks.templates import rendered
from tests.support.chat import chat_tree, write_tree
from tests.support.cli import Cli
from tests.support.json_lines import write_lines
from tests.support.runs import run_below

CUE = "{% if add_generation_prompt %}a{% endif %}"
BODY = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{% endfor %}" + CUE
CLOCK = "{{ 'b' * (strftime_now('%d') | int) }}" + BODY
THINKING = "{% if enable_thinking is defined and not enable_thinking %}bb{% endif %}" + BODY


def configured(folder: Path, model: Path, template: str, **task: Any) -> Path:
    """A run with this template on eight prompts; its folder has the model."""
    own = Path(shutil.copytree(model, folder / "model"))
    (own / "chat_template.jinja").write_text(template)
    write_lines(folder / "p.jsonl", [{"prompt": "ab" * n, "answer": "a"} for n in range(1, 9)])
    tree = chat_tree(own, {"kind": "jsonl", "path": "p.jsonl", **task}, {"kind": "exact_match"})
    tree["numerics"]["max_context"] = 60
    return write_tree(folder, tree)


def prompts_of(run_dir: Path, model: Path) -> set[str]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return {tokenizer.decode(ids) for ids in reader.read_sequences(run_dir)["prompt_ids"]}


def test_a_template_with_a_clock_needs_a_time_which_the_run_keeps(cli: Cli, tmp_path: Path, model: Path) -> None:
    config, out = configured(tmp_path, model, CLOCK), tmp_path / "runs"
    said = cli.refusal("run", config, "--out", out)
    assert "asks for the time" in said
    assert "set task.template_time" in said
    assert not [*out.rglob("manifest.json")]
    cli.done("run", config, "--out", out, "--set", "task.template_time=2026-11-03")
    run_dir = run_below(out)
    assert all(text.startswith("bbbu") for text in prompts_of(run_dir, model))
    assert cli("rerun", run_dir)[0] == 0
    assert load_config(run_dir / "config.yaml").task.template_time == "2026-11-03"


def test_chance_in_a_template_is_the_same_in_every_process(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{{ range(100000) | random }} {{ lipsum(1, false) }}"
    chat = [{"role": "user", "content": "ab"}]
    texts = set(rendered(tokenizer, [chat, chat]))
    templates._template_renderer().process.end()
    texts |= set(rendered(tokenizer, [chat, chat]))
    assert len(texts) == 1


def test_what_another_process_would_write_otherwise_is_refused(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{{ messages[0].items }}" + BODY
    with pytest.raises(UserError, match=r"writes an address of memory into the prompt \(.*items of dict object at 0x"):
        rendered(tokenizer, [[{"role": "user", "content": "ab"}]])
    tokenizer.chat_template = BODY
    said = "<f at 0xab>"
    assert rendered(tokenizer, [[{"role": "user", "content": said}]]) == [f"u{said}a"], "a user may write one"


def test_arguments_of_the_template_are_a_field(cli: Cli, tmp_path: Path, model: Path) -> None:
    config, out = configured(tmp_path, model, THINKING), tmp_path / "runs"
    argument = "task.template_arguments.enable_thinking=false"
    line = cli.refusal("run", config, "--out", out, "--set", argument.replace("false", "off"))
    assert "off may be a text or not; write true, false" in line
    cli.done("run", config, "--out", out, "--set", argument.replace("false", "False"))
    run_dir = run_below(out)
    assert all(text.startswith("bbu") for text in prompts_of(run_dir, model))
    line = cli.refusal("run", config, "--out", out, "--set", argument.replace("thinking", "thinkin"))
    said = "task.template_arguments.enable_thinkin: the tokenizer's template does not read it; did you mean enable_"
    assert said in line


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("task.template_arguments.messages=[]", "template_arguments.messages is not for the user to choose"),
        ("task.template_time=2026-13-01", "template_time = '2026-13-01': month must be in 1..12"),
        ("task.template_time=today", "must match the pattern"),
        ("task.chat_template=false", "template_arguments needs chat_template: true"),
    ],
)
def test_a_wrong_field_is_one_line(cli: Cli, tmp_path: Path, model: Path, field: str, message: str) -> None:
    config = configured(tmp_path, model, THINKING, template_arguments={"enable_thinking": True})
    assert message.lower() in cli.refusal("run", config, "--set", field).lower()


def test_tools_reach_the_template(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{{ tools[0].function.name }}" + BODY
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"path": "p"}}}]
    assert rendered(tokenizer, [[{"role": "user", "content": "x"}]], arguments={"tools": tools}) == ["adduxa"]


def test_a_template_with_the_tag_of_transformers_is_rendered_as_transformers_does(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}a{{ m.content }}{% endgeneration %}"
        "{% else %}u{{ m.content }}{% endif %}{% endfor %}" + CUE
    )
    chat = [{"role": role, "content": "b"} for role in ("user", "assistant", "user")]
    expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered(tokenizer, [chat]) == [expected] == ["ubabuba"]


def test_a_message_that_the_template_leaves_out_is_refused(cli: Cli, tmp_path: Path, model: Path) -> None:
    config = configured(tmp_path, model, BODY.replace("messages", "messages[-1:]"))
    rows = [[{"role": "system", "content": "s"}, {"role": "user", "content": "ab" * n}] for n in range(1, 9)]
    write_lines(tmp_path / "p.jsonl", [{"prompt": chat, "answer": "a"} for chat in rows])
    said = cli.refusal("run", config, "--out", tmp_path / "runs")
    assert "the tokenizer's chat template leaves out its message 's' of role system" in said


def test_what_cannot_be_saved_at_the_end_is_refused_at_the_start(cli: Cli, tmp_path: Path, model: Path) -> None:
    """A template of a name that transformers loads, and refuses to save."""
    config = configured(tmp_path, model, BODY)
    (tmp_path / "model" / "chat_template.jinja").unlink()
    path = tmp_path / "model" / "tokenizer_config.json"
    templates = [{"name": "default", "template": BODY}, {"name": "a/b", "template": BODY}]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": templates}))
    said = cli.refusal("run", config, "--out", tmp_path / "runs")
    assert "could not be saved with the trained weights (ValueError: Invalid chat" in said
    assert not [*(tmp_path / "runs").rglob("manifest.json")]


def test_a_file_for_dpo_has_the_fields_of_templates_at_its_top(cli: Cli, tmp_path: Path, model: Path) -> None:
    own = yaml.safe_load(configured(tmp_path, model, CLOCK).read_text())["model"]
    write_lines(tmp_path / "p.jsonl", [{"prompt": "ab" * n, "chosen": "a", "rejected": "b"} for n in range(1, 9)])
    tree = {"experiment": "d", "seed": 1, "model": own, "pairs": "p.jsonl", "num_eval_prompts": 2}
    tree |= {"dpo": {"minibatch_size": 4, "learning_rate": 1e-4}, "numerics": {"max_context": 60}}
    config = write_tree(tmp_path, {**tree, "chat_template": True})
    assert "; set template_time, such as" in cli.refusal("run", config, "--out", tmp_path / "runs")
    cli.done("run", config, "--out", tmp_path / "runs", "--set", "template_time=2026-11-03")
