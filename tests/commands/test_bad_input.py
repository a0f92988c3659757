"""Every command with input that no command can use: one line at once, exit code 2, nothing made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.base import output
from ppo_repro.base.errors import UserError
from ppo_repro.base.output import has_password, masked
from ppo_repro.config.files import load_config
from ppo_repro.config.yaml_text import MAX_BYTES, parse_yaml
from tests.support.cli import Cli, one_line
from tests.support.paths import ROOT, TINY

CONFIGURED = ("run", "plan", "grid")
RECORDED = ("resume", "rerun", "verify", "show", "track", "report", "view")
LOGIN = "http://user:secret@127.0.0.1:9/x"

# what a file may hold, and what is said of it
TEXTS = {
    "deep list": ("a: " + "[" * 800 + "]" * 800, "not valid YAML: maximum recursion depth"),
    "aliases": ("a: &a [x, x]\nb: &b [*a, *a]\n", "line 2: has a tag or an alias"),
    "digits": ("seed: " + "9" * 5000, "not valid YAML: Exceeds the limit"),
    "object": ("a: !!python/object/apply:os.system [x]\n", "line 1: has a tag or an alias"),
    "twice": ("seed: 1\nseed: 1\n", "line 2: field 'seed' is given twice"),
    "list": ("- 1\n", "must be a mapping of fields"),
    "nothing": ("", "must be a mapping of fields"),
    "login": (f"experiment: x\nbase: {LOGIN}\n", "line 2: has a URI or option with a password"),
    "large": ("#" * (MAX_BYTES + 1), "has more than 256 KiB"),
    "binary": ("\0\1\2", "not valid YAML"),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_file_that_is_no_configuration(cli: Cli, tmp_path: Path, text: str) -> None:
    content, said = TEXTS[text]
    path = tmp_path / "c.yaml"
    path.write_text(content)
    for command in CONFIGURED if text == "object" else ["run"]:
        code, out, err = cli(command, path)
        assert code == 2, command
        assert out == "", command
        assert said in one_line(err), command
        assert len(err) < 1100, command
        assert str(path) in err
        assert "secret" not in err


def test_a_fifo_is_refused_where_a_file_is_wanted(
    cli: Cli, tmp_path: Path, deterministic_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody writes into it, so whoever opens it waits for ever."""
    fifo, run_dir, dpo = tmp_path / "fifo", tmp_path / "run", tmp_path / "dpo.yaml"
    monkeypatch.chdir(tmp_path)
    run_dir.mkdir()
    os.mkfifo(fifo)
    os.mkfifo(run_dir / "manifest.json")
    dpo.write_text(
        f"experiment: x\nseed: 1\nrun: {deterministic_run}\npairs: fifo\nnum_eval_prompts: 1\n"
        "dpo: {minibatch_size: 1, learning_rate: 1}\nnumerics: {max_context: 24}\n"
    )
    given: list[tuple[str | Path, ...]] = [(command, fifo) for command in CONFIGURED]
    given += [(command, run_dir) for command in RECORDED if command != "view"]  # it shows the other runs
    for arguments in (
        *given,
        ("run", dpo),
        ("run", TINY, "--set", f"task={{kind: jsonl, path: {fifo}, num_eval_prompts: 1}}"),
    ):
        assert "it is no regular file" in cli.refusal(*arguments), arguments


def test_a_path_that_is_no_path(cli: Cli) -> None:
    given = [[command, LOGIN] for command in (*CONFIGURED, *RECORDED)]
    given += [[command, TINY, "--out", LOGIN] for command in ("run", "grid", "report")]
    for arguments in given:
        code, out, err = cli(*arguments)
        assert code == 2, arguments[0]
        assert out == "", arguments[0]
        assert "must be a path on this machine" in one_line(err), arguments[0]
        assert "secret" not in err


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("ppo.epochs=" + "9" * 90, "must be at most 2147483647"),
        ("ppo.learning_rate=" + "9" * 5000 + ".0", "ppo.learning_rate = inf"),
        ("a" * 100_000 + "=1", "unknown field"),
        ("\x1b[31mfoo=1", "\\x1b[31mfoo: unknown field"),
        ("layout.threads=257", "must be at most 256"),
        ('model={kind: folder, path: "a\\0b"}', "must be a path on this machine"),
        (f"model={{kind: folder, path: '{LOGIN}'}}", "has a URI or option with a password"),
    ],
    ids=range(7),
)
def test_an_override_that_is_no_value(cli: Cli, override: str, said: str) -> None:
    code, out, err = cli("plan", TINY, "--set", override)
    assert code == 2
    assert out == ""
    assert said in one_line(err)
    assert len(err) < 1100
    assert "secret" not in err


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)


@given(st.text(max_size=200) | st.text("[]{}&*!|>-?:,#'\"% \n\tab01.e", max_size=200) | plain.map(json.dumps))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    try:
        parse_yaml(text)
    except UserError as error:
        assert len(output.one_line(error).splitlines()) <= 1


@given(
    st.sampled_from(["ppo", "layout", "model", "reward.terms", "value", "rollout.engine", "seed", "kl.x", ""]), plain
)
def test_any_value_of_a_field_is_taken_or_refused(field: str, value: object) -> None:
    try:
        load_config(TINY, [f"{field}={json.dumps(value)}"])
    except UserError as error:
        assert output.one_line(error)


LOGINS = [
    ("http://user:secret@host/x", "http://***@host/x"),
    ("https://secret@host", "https://***@host"),
    ("postgresql+psycopg2://u:se/cr@et@host:5/db", "postgresql+psycopg2://***@host:5/db"),
    ("failed (http://u:secret@h); see http://u:secret@h/y", "failed (http://***@h); see http://***@h/y"),
    ("http://host/?password=secret&x=1", "http://host/?password=***&x=1"),
    ('{"a": "http://host/?token=secret"}', '{"a": "http://host/?token=***"}'),
    ("--api-key secret --x", "--api-key *** --x"),
    ("['--admin-api-key', 'secret']", "['--admin-api-key', '***']"),
    ("[--hf-token=secret]", "[--hf-token=***]"),
]


@pytest.mark.parametrize(("text", "shown"), LOGINS)
def test_a_password_is_masked(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert masked(text) == shown
    assert has_password(text)
    output.say(text)
    output.tell(text)
    assert capsys.readouterr() == (shown + "\n", shown + "\n")


def program(*arguments: str, shell_end: str) -> subprocess.CompletedProcess[str]:
    command = f"exec {sys.executable} -m ppo_repro {' '.join(arguments)} {shell_end}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)


def test_a_full_disk_behind_stdout_is_one_line() -> None:
    done = program("--version", shell_end="> /dev/full")
    assert done.returncode == 2
    assert "stdout: cannot be written (No space left on device)" in one_line(done.stderr)


def test_a_learning_rate_without_measure_is_the_users_mistake(cli: Cli, tmp_path: Path) -> None:
    said = cli.refusal("run", TINY, "--out", tmp_path, "--set", "ppo.learning_rate=1e30")
    assert "is not finite; lower the learning rate" in said.replace(", or further apart than float32 reaches", "")
