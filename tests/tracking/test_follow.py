"""A user's function beside a run: called with each iteration, and what it gets wrong never reaches the run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from ppo_repro.records import manifest, reader
from ppo_repro.tracking import following, function_copy, mlflow_copy
from ppo_repro.tracking.follower import FUNCTION, Copies, Target, copy, followed
from tests.grids.small_grids import written_grid
from tests.support.cli import Cli
from tests.support.paths import TINY
from tests.support.synthetic_run import cut_back
from tests.support.waiting import until

slow = pytest.mark.slow
FOLLOW = """
import json
from helper import PATH

def follow(metrics):
    with open(PATH, "a") as file:
        file.write(json.dumps(metrics) + "\\n")
    print("seen", metrics["iteration"])
"""


@pytest.fixture
def follow(tmp_path: Path) -> str:
    (tmp_path / "helper.py").write_text(f"PATH = {str(tmp_path / 'seen.jsonl')!r}\n")
    (tmp_path / "follow.py").write_text(FOLLOW)
    return f"{tmp_path}/follow.py:follow"


def seen(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]


def test_a_function_gets_every_iteration_of_a_recorded_run(
    cli: Cli, deterministic_run: Path, follow: str, tmp_path: Path
) -> None:
    assert cli.json("track", deterministic_run, "--uri", follow)["function"] == {"path": follow, "iterations": 3}
    rows = reader.read_iterations(deterministic_run)
    got = seen(tmp_path)
    assert [row["iteration"] for row in got] == [0, 1, 2]
    assert {row["run"] for row in got} == {str(deterministic_run)}
    assert [row["score_mean"] for row in got] == rows["score_mean"].tolist()
    assert ["eval_accuracy" in row for row in got] == rows["eval_accuracy"].notna().tolist()


def test_what_a_client_prints_is_no_part_of_the_result(
    cli: Cli, deterministic_run: Path, follow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_copy, "copy", lambda *about: print("a word of the client") or ([], {}))
    code, out, err = cli("track", deterministic_run, "--uri", follow, "--json")
    assert (code, json.loads(out)) == (0, {"function": {}})
    assert "a word of the client" in err


def test_a_run_that_removes_its_folder_has_no_copy(native_run: Path, tmp_path: Path) -> None:
    """A run does so if it fails before its first iteration."""
    run_dir = shutil.copytree(native_run, tmp_path / "run")

    def is_over(seconds: float) -> bool:
        shutil.rmtree(run_dir)
        return True

    assert following.follow(run_dir, is_over, lambda *_: pytest.fail("a copy began")) == []
    assert mlflow_copy.copy(run_dir, f"sqlite:///{tmp_path}/mlflow.db", lambda seconds: True) is None


def test_a_run_that_removes_its_folder_while_it_is_read_ends_no_copy(
    native_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [(tmp_path / "removed", {}), (native_run, {})]
    monkeypatch.setattr(following, "_runs", lambda folder: runs)
    begun = []
    with pytest.raises(KeyError, match=r"begun"):
        following.follow(native_run, lambda seconds: True, lambda run_dir, row: begun.append(run_dir) or {}["begun"])
    assert begun == [native_run]


def test_the_copy_of_a_run_that_removed_its_folder_has_failed(native_run: Path, tmp_path: Path) -> None:
    run_dir, looks = Path(shutil.copytree(native_run, tmp_path / "run")), iter([False, True])
    cut_back(run_dir, 1, "running")

    def is_over(seconds: float) -> bool:
        if over := next(looks):
            shutil.rmtree(run_dir)
        return over

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert mlflow_copy.copy(run_dir, uri, is_over) is None
    (found,) = MlflowClient(uri).search_runs([e.experiment_id for e in MlflowClient(uri).search_experiments()])
    assert found.info.status == "FAILED"


def test_a_folder_without_records_has_no_copy(follow: str, tmp_path: Path) -> None:
    assert copy(tmp_path / "run", Target(FUNCTION, follow)) == Copies()


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("def follow(metrics): pass\n", "other", "follow.py has no other"),
        ("def follow(): pass\n", "follow", "follow.py:1: follow cannot be called"),
        ("x = 1\nx = 1 / 0\n", "follow", "follow.py:2 fails to load (ZeroDivisionError: division by zero)"),
        ("follow = 3\n", "follow", "follow is no function"),
        ("import os\nos._exit(7)\n", "follow", "fails to load (its process ended with 7)"),
    ],
)
def test_a_function_that_cannot_be_called_is_one_line_before_the_run(
    text: str, name: str, said: str, cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "follow.py").write_text(text)
    line = cli.refusal("run", TINY, "--out", tmp_path / "runs", "--track", f"{tmp_path}/follow.py:{name}")
    assert said in line
    assert "--track" in line
    assert not (tmp_path / "runs").exists()


def test_two_places_of_one_kind_are_refused(cli: Cli, follow: str, tmp_path: Path) -> None:
    said = cli.refusal("run", TINY, "--track", "sqlite:///a.db", "--track", "mlflow")
    assert "sqlite:///a.db and mlflow are of one kind; give one of each kind" in said


def test_a_client_that_prints_much_does_not_stop(
    deterministic_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody reads what it prints before the run ends; this one prints more than a pipe holds, as a library may."""
    printing = "import os\nfrom helper import PATH\n\ndef follow(metrics):\n    os.write(1, b'x' * 200_000)\n"
    (tmp_path / "helper.py").write_text(f"PATH = {str(tmp_path / 'seen')!r}\n")
    (tmp_path / "follow.py").write_text(printing + "    open(PATH, 'a').write('seen')\n")
    target, copies = Target(FUNCTION, f"{tmp_path}/follow.py:follow"), Copies()
    with followed(deterministic_run, copies, [target]):
        until(lambda: (tmp_path / "seen").exists() and (tmp_path / "seen").read_text() == 3 * "seen", "a copy", 30.0)
    assert copies.fields == {FUNCTION: {"path": target.place, "iterations": 3}}
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("x") >= 600_000


@slow
def test_a_run_is_followed_while_it_works(cli: Cli, follow: str, tmp_path: Path) -> None:
    code, out, err = cli("run", TINY, "--out", tmp_path / "runs", "--track", follow)
    assert code == 0
    assert f"told        {follow} of 2 iterations" in out
    assert "tracking" not in err
    assert [row["iteration"] for row in seen(tmp_path)] == [0, 1]


@slow
def test_a_resumed_run_is_followed_from_its_first_iteration(cli: Cli, follow: str, tmp_path: Path) -> None:
    few = ("--set", "ppo.iterations=3", "--set", "checkpoints.every=1")
    run_dir = cli.json("run", TINY, "--out", tmp_path / "runs", *few)["run_dir"]
    cut_back(Path(run_dir), 3, "interrupted")  # before its ending
    assert cli.json("resume", run_dir, "--track", follow)["function"]["iterations"] == 3
    assert [row["iteration"] for row in seen(tmp_path)] == [0, 1, 2]


@slow
def test_a_process_that_aborts_after_its_last_copy_has_made_every_copy(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "follow.py").write_text("import atexit, os\ndef follow(metrics):\n    atexit.register(os.abort)\n")
    said = cli.json("run", TINY, "--out", tmp_path, "--track", f"{tmp_path}/follow.py:follow")
    assert said["function"]["iterations"] == 2


@slow
def test_a_process_that_a_function_leaves_behind_holds_up_no_run(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppo_repro.tracking.follower.END_SECONDS", 5.0)
    left = "    if os.fork() == 0:\n        time.sleep(1000)\n"
    told = f"    print(os.getpid(), file=open({str(tmp_path / 'pids')!r}, 'a'), flush=True)\n"
    body = left.replace("        time", f"    {told}        time")
    (tmp_path / "follow.py").write_text(f"import os, time\ndef follow(metrics):\n{body}")
    try:
        said = cli.json("run", TINY, "--out", tmp_path, "--track", f"{tmp_path}/follow.py:follow")
        assert said["function"]["iterations"] == 2
    finally:
        for pid in (tmp_path / "pids").read_text().split():
            os.kill(int(pid), signal.SIGKILL)


@slow
@pytest.mark.parametrize("last", ["raise ValueError('no')", "import os; os._exit(0)", "while True: pass"])
def test_a_function_that_fails_costs_a_run_nothing(
    last: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "while" in last:
        monkeypatch.setattr("ppo_repro.tracking.follower.END_SECONDS", 3.0)
    (tmp_path / "follow.py").write_text(f"def follow(metrics):\n    {last}\n")
    command = ["run", TINY, "--out", tmp_path, "--track", f"{tmp_path}/follow.py:follow", "--json"]
    code, out, err = cli(*command)
    run_dir = Path(json.loads(out)["run_dir"])
    (said,) = [line for line in err.splitlines() if line.startswith("tracking ")]
    assert code == 0
    assert f"ppo-repro track {run_dir} --uri {tmp_path}/follow.py:follow" in said
    assert ("follow.py:2: follow raised ValueError: no" in said) is ("raise" in last)
    assert manifest.load(run_dir).status == "complete"


@slow
def test_a_system_without_another_process_costs_a_run_nothing(
    cli: Cli, follow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("ppo_repro.tracking.follower.subprocess.Popen", refuse)
    monkeypatch.setattr("ppo_repro.tracking.follower._check_function", lambda path: None)
    code, _, err = cli("run", TINY, "--out", tmp_path / "runs", "--track", follow)
    assert code == 0
    assert "tracking did not start (Resource temporarily unavailable); copy the records later with `ppo-repro" in err


@pytest.mark.parametrize("is_left", [True, False])
def test_a_folder_that_was_removed_is_not_to_be_copied_later(
    is_left: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that Ctrl-C ends before its first iteration leaves no folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    with followed(folder, Copies(), [Target("nothing", "")]):  # whose process fails at once
        if not is_left:
            folder.rmdir()
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("tracking failed: its process ended with 1")
    assert ("later" in said) is is_left
    assert "complete" not in said, "an interrupted run is not"


def test_a_password_is_in_no_list_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands, start = list[str](), subprocess.Popen

    def noted(command: list[str], **options: Any) -> subprocess.Popen[str]:
        commands.extend(command)
        return start(command, **options)

    monkeypatch.setattr("subprocess.Popen", noted)
    with followed(tmp_path, Copies(), [Target("nothing", "postgresql://user:password@host/db")]):
        pass
    assert "nothing" in commands
    assert not any("host" in word for word in commands)


@slow
def test_a_grid_is_followed(cli: Cli, follow: str, tmp_path: Path) -> None:
    cli.done("grid", written_grid(tmp_path, seeds=[1, 2]), "--out", tmp_path, "--track", follow)
    assert sorted((Path(str(row["run"])).name[:5], row["iteration"]) for row in seen(tmp_path)) == [
        ("seed1", 0), ("seed1", 1), ("seed2", 0), ("seed2", 1)
    ]  # fmt: skip
