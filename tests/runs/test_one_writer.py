"""One process at a time writes a run or a grid: the others name it, end with 2, and change nothing."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.base.lock import only_writer
from ppo_repro.config.inputs import run_folder
from ppo_repro.records import manifest
from ppo_repro.runs.fork_plan import plan_fork
from ppo_repro.runs.verify_files import verify_files
from tests.support.cli import Cli, sets
from tests.support.control import resume, run, small_control
from tests.support.language import tiny_run

HERE = socket.gethostname()
QUICK = ("ppo.iterations=2", "checkpoints.every=1", "model.warm_start_steps=3")


def test_whoever_comes_at_any_moment_of_a_run_is_refused_and_the_run_is_whole(
    control_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before every fsync of the run, from its first one on, the same run is started again, and resumed if it can be."""
    config, came, busy = small_control(), Counter[str](), threading.Lock()
    run_dir = run_folder(config, tmp_path)
    run_dir.parent.mkdir()

    def come(descriptor: int) -> None:
        if not busy.acquire(blocking=False):  # of the one who came
            return
        comers: dict[str, Callable[[], object]] = {"run": lambda: run(config, tmp_path)}
        if run_dir.exists():
            comers["resume"] = lambda: resume(run_dir)
        for name, comer in comers.items():
            with pytest.raises(UserError, match=rf"is writing it \(process {os.getpid()} on {HERE}, since "):
                comer()
            came[name] += 1
        busy.release()

    monkeypatch.setattr(os, "fsync", come)
    assert run(config, tmp_path)[0] == run_dir
    monkeypatch.undo()
    assert came["run"] > came["resume"] > 50, came
    assert manifest.load(run_dir).fingerprint == manifest.load(control_run).fingerprint
    assert verify_files(run_dir).unfinished == ()
    assert [path.name for path in run_dir.parent.iterdir()] == [run_dir.name]


def test_a_fork_into_a_folder_that_is_written_is_refused(cli: Cli, tmp_path: Path) -> None:
    origin, change = tiny_run(tmp_path / "origin", *QUICK), ["kl.kl_coef=0.5"]
    folder = plan_fork(origin, 1, change, tmp_path / "forks", None).folder
    command = ("fork", origin, "--at", "1", *sets(*change), "--out", tmp_path / "forks")
    with only_writer(folder):
        code, _, said = cli(*command)
    assert (code, f"{folder}: another process is writing it (process {os.getpid()} on {HERE}, " in said) == (2, True)
    assert not folder.exists()
    cli.done(*command)
