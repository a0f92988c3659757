"""`init`: what it writes runs as it is, and nothing is overwritten."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ppo_repro.commands import start
from ppo_repro.config.files import load_config
from tests.support.cli import Cli
from tests.support.paths import ROOT

FILES = ["prompts.jsonl", "reward.py", "run.yaml", "test_run.py"]


def pytest_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)


def test_a_folder_to_start_from(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = cli.done("init", "new/one folder")
    assert sorted(p.name for p in (tmp_path / "new" / "one folder").iterdir()) == FILES
    assert "cd 'new/one folder' && ppo-repro run run.yaml" in out
    assert "init --model smollm2" in out
    monkeypatch.chdir(tmp_path / "new" / "one folder")
    config = load_config(Path("run.yaml"))
    assert config.model.kind == "tiny"
    assert len(Path("prompts.jsonl").read_text().splitlines()) == 400
    done = pytest_in(tmp_path / "new" / "one folder", "-k", "not one_iteration")
    assert done.returncode == 0
    assert "2 passed" in done.stdout


@pytest.mark.parametrize("there", [True, False])
def test_what_its_check_needs_is_said_where_it_is_missing(
    there: bool, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "find_spec", lambda name: there or None)
    out = cli.done("init", tmp_path / "new")
    assert ("needs pytest; install it with pip install pytest" in out) is not there


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_overwritten(cli: Cli, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    assert f"{tmp_path / name}: exists already; nothing was written" in cli.refusal("init", tmp_path)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(name, "mine")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_it_writes_trains_and_its_own_test_passes(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # away from a real model that was fetched
    assert cli("init", tmp_path / "new")[0] == 0
    done = pytest_in(tmp_path / "new")
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout, done.stdout
    command = [sys.executable, "-m", "ppo_repro", "run", "run.yaml", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "new", env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    summary = json.loads(ran.stdout)
    assert summary["unequal_old_rollout_logprobs"] == 0
    assert summary["reward_last"] > summary["reward_first"]
