"""Every analysis as a program: what a user does wrong is one line and exit code 2, whatever stdout and stderr are."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import pytest

from ppo_repro.analysis.report.build import write_report
from ppo_repro.base.errors import UserError
from tests.support.cli import Cli, one_line
from tests.support.paths import ROOT

# the module with `main`, and the shortest command line that is complete; RUN is a recorded run
COMMANDS = {
    "analysis.mismatch": ("analysis.mismatch.tables", ["RUN"]),
    "analysis.compare": ("analysis.compare.verdicts", ["RUN", "RUN", "--seed", "0"]),
    "analysis.clipping": ("analysis.clipping.tables", ["RUN"]),
    "analysis.tokenization": ("analysis.tokenization.tables", ["RUN", "--boundary", "leading"]),
    "analysis.grids.table": ("analysis.grids.table", ["RUN"]),
    "analysis.figures": ("analysis.figures", ["learning", "x.svg", "RUN"]),
}
Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(deterministic_run: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs a command in this process: exit code, stdout, stderr."""

    def ask_it(command: str, *arguments: str) -> tuple[int, str, str]:
        main = import_module(f"ppo_repro.{COMMANDS[command][0]}").main
        code = main([str(deterministic_run) if word == "RUN" else word for word in arguments])
        return code, *capsys.readouterr()

    return ask_it


def test_no_command_is_forgotten() -> None:
    found = set()
    for path in sorted((ROOT / "analysis").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if path.stem == "__main__" or '__name__ == "__main__"' in path.read_text():
            found.add(name.removesuffix(".__main__"))
    assert found == {*COMMANDS, "analysis.notebooks"}  # notebooks need libraries of their own


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_command_line_is_one_line(ask: Ask, command: str) -> None:
    for arguments in ([*COMMANDS[command][1], "--nonsense"], ["--nonsense"], []):
        code, out, err = ask(command, *arguments)
        assert code == 2
        assert not out
        assert one_line(err).endswith(f"; try python -m ppo_repro.{command} --help")
        assert err.count("\n") == 1
    code, out, err = ask(command, "--help")
    assert code == 0
    assert out.startswith(f"usage: python -m ppo_repro.{command}")
    assert not err


@pytest.mark.parametrize("command", [name for name in COMMANDS if ".grids." not in name])
def test_the_latest_run_has_an_answer(
    ask: Ask, command: str, deterministic_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(deterministic_run, tmp_path / "runs" / "run")
    monkeypatch.chdir(tmp_path)
    code, out, err = ask(command, *("latest" if word == "RUN" else word for word in COMMANDS[command][1]))
    assert code == 0
    assert out.count("\n") > 5 or Path("x.svg").is_file()
    assert not err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_is_none_is_one_line(ask: Ask, command: str, tmp_path: Path) -> None:
    code, out, err = ask(command, *(str(tmp_path / "no") if word == "RUN" else word for word in COMMANDS[command][1]))
    assert code == 2
    assert not out
    assert "no" in one_line(err)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("analysis.compare", ["RUN", "RUN", "--seed", "-1"], "--seed -1: must be 0 or more"),
        ("analysis.compare", ["RUN", "RUN", "--seed", "0", "--iterations", "0", "9" * 30], "which both runs have"),
        ("analysis.clipping", ["RUN", "--clip-range", "nan", "1"], "clip range = nan, 1"),
        ("analysis.mismatch", ["RUN", "RUN"], "ppo_repro.analysis.compare takes two runs"),
        ("analysis.mismatch", ["x.jsonl", "--columns", "verl", "--pair", "rollout_vs_old"], "is for recorded runs"),
        ("analysis.tokenization", ["RUN", "--boundary", "leading", "--iteration", "-1"], "no iteration -1"),
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
        ("experiments.accuracy.__main__", ["no", "text.txt"]),
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
        return ask("analysis.figures", "learning", str(path), "RUN")[::2]

    for _ in range(2):  # over nothing, and over what was written before
        assert write(tmp_path / "ours")[0] == 0
    (tmp_path / "notes").write_text("of mine")
    for name, message in (("notes", "was not written by ppo-repro"), ("no/x", "no; make it"), ("", "was not written")):
        code, said = write(tmp_path / name)
        assert code == 2
        assert message in said.splitlines()[-1]
    assert (tmp_path / "notes").read_text() == "of mine"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("> /dev/full", 2, "stdout: cannot be written (No space left on device)"),
        pytest.param(">&-", 2, "stdout is closed", marks=pytest.mark.slow),
        pytest.param("| head -1", 0, "", marks=pytest.mark.slow),
    ],
)
def test_streams_that_are_full_closed_or_left(deterministic_run: Path, end: str, code: int, message: str) -> None:
    line = f"{sys.executable} -m ppo_repro.analysis.mismatch {deterministic_run} {end}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == code, done.stderr
    assert bool(done.stdout) == (code == 0), done.stderr
    assert message in one_line(done.stderr) if message else not done.stderr
