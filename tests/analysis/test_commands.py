"""Every analysis as a program: what a user does wrong is one line and exit code 2, whatever stdout and stderr are."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ppo_repro.analysis.report.build import write_report
from ppo_repro.base.errors import UserError
from ppo_repro.commands.analyse import ANALYSES
from ppo_repro.records import reader
from tests.support.cli import Cli, one_line
from tests.support.json_lines import write_lines
from tests.support.paths import ROOT
from tests.testing.audit.rows import ROWS

# the shortest command line of each analysis that is complete; RUN is a recorded run
COMMANDS = {
    "mismatch": ["RUN"],
    "compare": ["RUN", "RUN"],
    "clipping": ["RUN"],
    "tokenization": ["RUN"],
    "table": ["RUN"],
    "figure": ["agreement", "x.svg", "RUN"],
}
Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(deterministic_run: Path, cli: Cli) -> Ask:
    """Runs an analysis: exit code, stdout, stderr."""

    def ask_it(command: str, *arguments: str) -> tuple[int, str, str]:
        return cli("analyse", command, *(str(deterministic_run) if word == "RUN" else word for word in arguments))

    return ask_it


def test_no_analysis_is_forgotten() -> None:
    files = {path.stem for path in (ROOT / "ppo_repro" / "commands" / "analyses").glob("*.py")} - {"__init__"}
    assert set(COMMANDS) == set(ANALYSES) == files


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_command_line_is_one_line(ask: Ask, command: str) -> None:
    for arguments in ([*COMMANDS[command], "--nonsense"], ["--nonsense"], []):
        code, out, err = ask(command, *arguments)
        assert code == 2
        assert not out
        assert one_line(err).endswith(f"; try ppo-repro analyse {command} --help")
        assert err.count("\n") == 1
    code, out, err = ask(command, "--help")
    assert code == 0
    assert out.startswith(f"usage: ppo-repro analyse {command}")
    assert not err


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "table"])
def test_the_latest_run_has_an_answer(
    ask: Ask, command: str, deterministic_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(deterministic_run, tmp_path / "runs" / "run")
    monkeypatch.chdir(tmp_path)
    code, out, err = ask(command, *("latest" if word == "RUN" else word for word in COMMANDS[command]))
    assert code == 0
    assert out.count("\n") > 5 or Path("x.svg").is_file()
    assert not err


def test_an_analysis_has_its_numbers_in_json(
    deterministic_run: Path, native_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """A number of each printed table, as the run has it; `table` is tested on a grid."""
    monkeypatch.chdir(tmp_path)

    def found(*words: str | Path) -> dict[str, Any]:
        return cli.json("analyse", *words)

    metrics = {row["metric"]: row["value"] for row in found("mismatch", native_run)["metrics"]}
    assert metrics["n_tokens"] == len(reader.read_tokens(native_run))
    remedies = found("mismatch", native_run, "--remedies")["remedies"]
    assert (remedies[0]["remedy"], remedies[0]["tokens_changed"]) == ("none", 0.0)
    clipping = found("clipping", native_run, "--early-stop-kl", "1")
    assert clipping["n_tokens"] == len(reader.read_updates(native_run))
    assert {stop["estimate"] for stop in clipping["early_stops"]} == {"k1", "k3"}
    words = found("tokenization", native_run, "--iteration", "1")
    assert (words["iteration"], words["drift"][0]["iteration"], words["clip"][0]["epoch"]) == (1, 1, 0)
    compared = found("compare", deterministic_run, native_run)["findings"]
    assert compared[0]["verdict"].startswith("different: ")
    assert found("figure", "agreement", "x.svg", native_run) == {"figure": "x.svg"}


def test_files_of_another_stack_need_no_format(cli: Cli, tmp_path: Path) -> None:
    files = [write_lines(tmp_path / f"{name}.jsonl", [ROWS["verl"]] * 2) for name in "ab"]
    found = cli.json("analyse", "mismatch", *files)
    assert found == cli.json("analyse", "mismatch", *files, "--format", "verl")
    assert {row["metric"]: row["value"] for row in found["metrics"]}["n_tokens"] == 8
    assert "--pair rollout_vs_old: is for recorded runs" in cli.refusal(
        "analyse", "mismatch", *files, "--pair", "rollout_vs_old"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_is_none_is_one_line(ask: Ask, command: str, tmp_path: Path) -> None:
    code, out, err = ask(command, *(str(tmp_path / "no") if word == "RUN" else word for word in COMMANDS[command]))
    assert code == 2
    assert not out
    assert "no" in one_line(err)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("compare", ["RUN", "RUN", "--seed", "-1"], "--seed -1: must be 0 or more"),
        ("compare", ["RUN"], "1 given: give two runs"),
        ("compare", ["RUN", "RUN", "--iterations", "0", "9" * 30], "which both runs have"),
        ("clipping", ["RUN", "--clip-range", "nan", "1"], "clip range = nan, 1"),
        ("mismatch", ["RUN", "RUN"], "`ppo-repro analyse compare` takes two runs"),
        ("mismatch", ["x.jsonl", "--format", "verl", "--pair", "rollout_vs_old"], "is for recorded runs"),
        ("tokenization", ["RUN", "--iteration", "-1"], "no iteration -1"),
    ],
)
def test_a_wrong_value_is_one_line(ask: Ask, command: str, arguments: Sequence[str], message: str) -> None:
    code, out, err = ask(command, *arguments)
    assert code == 2
    assert not out
    assert message in one_line(err)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("experiments.benchmarks.float64", ["no", "text.txt"]),
        ("experiments.optimum.exact", ["no"]),
        ("experiments.benchmarks.numerics", ["--model", "no"]),
    ],
)
def test_an_experiment_on_a_folder_that_is_none_is_one_line(
    module: str, words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main = import_module(module).main
    for arguments, message in ((words, "no: "), (["--nonsense"], "--help")):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert not out
        assert message in one_line(err)
        assert err.count("\n") == 1


@pytest.mark.parametrize("kind", ["report", "figure", "in Python"])
def test_only_a_file_of_ours_is_written_over(
    kind: str, deterministic_run: Path, tmp_path: Path, cli: Cli, ask: Ask
) -> None:
    def write(path: Path) -> tuple[int, str]:
        if kind == "in Python":
            try:
                return 0 * write_report([deterministic_run], path)[1], ""
            except UserError as error:
                return 2, str(error)
        if kind == "report":
            return cli("report", deterministic_run, "--out", path)[::2]
        return ask("figure", "agreement", str(path), "RUN")[::2]

    for _ in range(2):  # over nothing, and over what was written before
        assert write(tmp_path / "ours")[0] == 0
    (tmp_path / "notes").write_text("of mine")
    for name, message in (("notes", "was not written by ppo-repro"), ("no/x", "no; make it"), ("", "was not written")):
        code, said = write(tmp_path / name)
        assert code == 2
        assert message in said.splitlines()[-1]
    assert (tmp_path / "notes").read_text() == "of mine"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("> /dev/full", 2, "stdout: cannot be written (No space left on device)"),
        (">&-", 2, "stdout is closed"),
        ("| head -1", 0, ""),
    ],
)
def test_streams_that_are_full_closed_or_left(deterministic_run: Path, end: str, code: int, message: str) -> None:
    line = f"{sys.executable} -m ppo_repro analyse mismatch {deterministic_run} {end}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == code, done.stderr
    assert bool(done.stdout) == (code == 0), done.stderr
    assert message in one_line(done.stderr) if message else not done.stderr
