"""No text that a command prints controls a terminal: names of files, responses of a model, messages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ppo_repro.base import output
from ppo_repro.base.progress import ConsoleProgress
from tests.analysis.report.hostile_run import make_hostile_run
from tests.support.cli import Cli, folder_config, one_line, write_prompts

NAME = "a\x1b[31m\x9b\u202e\x07b"  # ESC, its one-byte form, a bidirectional override, a bell
SHOWN = r"a\x1b[31m\x9b\u202e\x07b"


def is_harmless(text: str) -> bool:
    return all(c.isprintable() or c in "\n\t" for c in text)


@pytest.fixture(scope="module")
def named(native_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose folder and whose responses have control characters."""
    return make_hostile_run(native_run, tmp_path_factory.mktemp("runs") / NAME)


def test_a_folder_with_control_characters_in_its_name(cli: Cli, named: Path, tmp_path: Path) -> None:
    report = ("report", named, "--out", tmp_path / NAME)
    for arguments in (("show", named), ("show", named.parent), ("verify", named), report):
        code, out, err = cli(*arguments)
        assert code in (0, 2)
        assert SHOWN in out + err
        assert is_harmless(out)
        assert is_harmless(err)


def test_samples_with_control_characters(cli: Cli, named: Path) -> None:
    out = cli.done("show", named, "--samples", "64")
    assert r"\x1b[31m" in out
    assert is_harmless(out)


def test_json_keeps_the_text(cli: Cli, named: Path, tmp_path: Path) -> None:
    shutil.copytree(named, tmp_path / NAME)
    code, out, err = cli("show", tmp_path, "--json")
    assert code == 0
    assert json.loads(out)["runs"][0]["folder"].endswith(NAME)
    assert is_harmless(out)
    assert is_harmless(err)


def test_files_that_are_missing(cli: Cli, tmp_path: Path) -> None:
    config = folder_config(
        tmp_path / f"{NAME}.yaml", Path("nowhere"), write_prompts(tmp_path / "p.jsonl", "1+2=", "2+1=", "1+1=")
    )
    config.write_text(config.read_text().replace("nowhere", r"m\e[31m\u202e"))
    for path, shown in ((config, r"m\x1b[31m\u202e"), (tmp_path / NAME, SHOWN)):
        code, out, err = cli("run", path)
        assert code == 2
        assert out == ""
        assert shown in one_line(err)
        assert is_harmless(err)


def test_progress_and_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    with ConsoleProgress() as progress:
        progress.iteration(1, 2, f"{NAME}[red]", 1.0)
        progress.warning(f"{NAME}\nc")
    err = capsys.readouterr().err
    assert f"iteration 1/2: {SHOWN}[red]" in err
    assert f"warning: {SHOWN} c" in err
    assert is_harmless(err)


@given(st.dictionaries(st.text(), st.text() | st.floats(allow_nan=False, allow_infinity=False)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_as_json_and_as_lines(capsys: pytest.CaptureFixture[str], value: dict[str, str | float]) -> None:
    output.print_json(value)
    out = capsys.readouterr().out
    assert is_harmless(out)
    assert out.count("\n") == 1
    assert json.loads(out) == value or output.masked(out) != out
    output.tell("".join(value))
    output.say_anyway("".join(value))
    out, err = capsys.readouterr()
    assert is_harmless(out)
    assert is_harmless(err)
    assert err.count("\n") == 1
