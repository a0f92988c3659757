"""Recorded runs and grids in W&B's offline files, as `wandb leet inspect`, the client's own reader, prints them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ppo_repro.records import manifest, reader
from tests.grids.small_grids import written_grid
from tests.support.cli import Cli, one_line
from tests.support.paths import ROOT, TINY

pytestmark = pytest.mark.skipif(find_spec("wandb") is None, reason="the extra [wandb] is not installed")
slow = pytest.mark.slow


@dataclass(frozen=True)
class Offline:
    """A run of W&B as its reader prints it."""

    about: dict[str, Any]
    config: dict[str, Any]
    history: list[dict[str, Any]]
    summary: dict[str, Any]
    files: set[str]
    exit_code: int

    def column(self, axis: str, name: str) -> list[tuple[int, float]]:
        return [(row[axis], row[name]) for row in self.history if name in row]


def command(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, without what this machine may know of W&B."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    return subprocess.run(
        [sys.executable, "-m", "ppo_repro", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**known, "PYTHONPATH": str(ROOT), "HOME": str(Path.cwd()), **environment},
        check=False,
    )


def offline(*arguments: str | Path) -> dict[str, Any]:
    done = command(*arguments, "--json", WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def as_read(folder: str) -> Offline:
    program = str(Path(sys.executable).with_name("wandb"))
    done = subprocess.run([program, "leet", "inspect", folder, "--json"], capture_output=True, text=True, check=True)
    about, config, summary, files, history, code = dict[str, Any](), {}, {}, set[str](), [], -1
    for record in map(json.loads, done.stdout.splitlines()):
        found = record.get(record["type"])
        if record["type"] == "run":
            about |= found
            config |= found["config"]["update"]
        elif record["type"] == "history":
            history.append(found["item"])
        elif record["type"] == "summary":
            summary |= found["update"]
        elif record["type"] == "files":
            files |= {file["path"] for file in found["files"]}
        elif record["type"] == "exit":
            code = found.get("exit_code", 0)
    return Offline(about, config, history, summary, files, code)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@slow
def test_a_copy_has_what_the_run_recorded(deterministic_run: Path) -> None:
    said = offline("track", deterministic_run, "--uri", "wandb")["wandb"]
    (place,) = said["runs"]
    read, recorded = as_read(place["folder"]), manifest.load(deterministic_run)
    assert place["url"] == ""
    assert read.exit_code == 0
    about = (read.about["project"], read.about["display_name"], read.about["job_type"])
    assert about == ("small", deterministic_run.name, "language")
    assert read.config["ppo"]["objective"]["clip_range"] == 0.2
    iterations, steps = reader.read_iterations(deterministic_run), reader.read_steps(deterministic_run)
    assert read.column("iteration", "iteration/reward_mean") == list(enumerate(iterations["reward_mean"].tolist()))
    assert read.column("step", "step/grad_norm") == list(enumerate(steps["grad_norm"].tolist()))
    evaluated = read.column("iteration", "iteration/eval_accuracy")
    assert [step for step, _ in evaluated] == [0, 2, 3], "a value that was not measured is not logged"
    assert evaluated[-1][1] == recorded.final["eval_accuracy"] == read.summary["final/eval_accuracy"]
    moments = {row["iteration"]: row["_timestamp"] for row in read.history if "iteration/reward_mean" in row}
    assert list(moments.values()) == pytest.approx(iterations["ended_at"].tolist(), abs=1e-3)
    assert read.summary["fingerprint"] == recorded.fingerprint
    names = {"config.yaml", "environment.json", "iterations.jsonl", "manifest.json", "report.html"}
    assert {f"ppo_repro/{name}" for name in names} <= read.files
    assert all((Path(place["folder"]) / "files" / "ppo_repro" / name).is_file() for name in names)
    (again,) = offline("track", deterministic_run, "--uri", "wandb")["wandb"]["runs"]
    assert as_read(again["folder"]).about["run_id"] == read.about["run_id"], "a second copy replaces the first"


@slow
def test_a_run_and_its_fork_are_followed(tmp_path: Path) -> None:
    few = ("--set", "ppo.iterations=3", "--set", "checkpoints.every=1")
    ran = offline("run", TINY, "--out", tmp_path, *few, "--track", "wandb", "--name", "first try")
    followed, run_dir = as_read(ran["wandb"]["runs"][0]["folder"]), ran["run_dir"]
    copied = as_read(offline("track", run_dir, "--uri", "wandb")["wandb"]["runs"][0]["folder"])
    assert followed.about["display_name"] == "first try"
    columns = ("iteration/score_mean", "iteration/eval_score")
    assert [followed.column("iteration", name) for name in columns] == [copied.column("iteration", n) for n in columns]
    forked = offline("fork", run_dir, "--at", "2", "--set", "ppo.epochs=1", "--out", tmp_path, "--track", "wandb")
    fork = as_read(forked["wandb"]["runs"][0]["folder"])
    origin = fork.config["ppo_repro"]["origin"]
    assert fork.about["job_type"] == "fork"
    assert origin["wandb_id"] == followed.about["run_id"]
    assert origin["iteration"] == 2
    assert origin["changed"] == {"ppo.epochs": [2, 1]}
    both = [run.column("iteration", "iteration/score_mean") for run in (followed, fork)]
    assert both[0][:2] == both[1][:2]
    assert len(both[1]) == 3


@slow
def test_a_grid_is_a_group(tmp_path: Path) -> None:
    path = written_grid(tmp_path, axes={"ppo.epochs": [1, 2]})
    said = offline("grid", path, "--out", tmp_path, "--workers", "2", "--track", "wandb")["wandb"]
    cells = pd.read_parquet(tmp_path / "g" / "cells.parquet").set_index("cell")
    runs = {run.about["display_name"]: run for run in (as_read(place["folder"]) for place in said["runs"])}
    assert said["group"] == "g"
    assert set(runs) == set(cells.index)
    for name, run in runs.items():
        assert (run.about["run_group"], run.about["job_type"]) == ("g", "cell")
        assert run.summary["fingerprint"] == cells["fingerprint"][name]
        about = run.config["ppo_repro"]
        assert about["axis.ppo.epochs"] == cells["axis.ppo.epochs"][name]
        assert about["question"] == "q?"


@slow
def test_a_client_that_is_not_logged_in_is_one_line(deterministic_run: Path) -> None:
    done = command("track", deterministic_run, "--uri", "wandb")
    said = one_line(done.stderr)
    assert done.returncode == 2
    assert "No API key configured" in said
    assert "WANDB_MODE=offline" in said


@slow
def test_a_client_that_is_not_logged_in_costs_a_run_nothing(tmp_path: Path) -> None:
    done = command("run", TINY, "--out", tmp_path, "--track", "wandb", "--json")
    run_dir = json.loads(done.stdout)["run_dir"]
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("tracking failed: wandb: ")]
    assert done.returncode == 0
    assert "No API key configured" in said
    assert "WANDB_MODE=offline" in said
    assert f"ppo-repro track {run_dir} --uri wandb" in said
    assert manifest.load(Path(run_dir)).status == "complete"


def test_without_the_package_nothing_begins(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppo_repro.tracking.follower.find_spec", lambda name: None)
    said = cli.refusal("run", TINY, "--out", tmp_path / "runs", "--track", "wandb")
    assert "pip install 'ppo_repro[wandb]'" in said
    assert not (tmp_path / "runs").exists()
