"""Grids on a real Slurm and a real Ray of two nodes: preemption, lost nodes, scancel; and what is refused."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ppo_repro.commands.cli import _run
from ppo_repro.grids import slurm
from ppo_repro.grids.cell import LOG, LOST, Order, Result, finish_cell, last_result, state_of
from ppo_repro.grids.engines import Processes
from ppo_repro.grids.grid import run_grid
from ppo_repro.grids.progress import ConsoleGrid
from ppo_repro.grids.slurm import Slurm
from ppo_repro.grids.spec import load_grid
from tests.grids.slurm import Cluster, cluster
from tests.grids.small_grids import fingerprints, grid_file, held_grid_file, resumed
from tests.support.runs import recorded_iterations

slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(400)
LOOK_SECONDS = 180.0


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


class Acting(ConsoleGrid):
    """Acts while the grid waits: each action once, as soon as it returns something else than False."""

    def __init__(self, *actions: Callable[[], object]) -> None:
        super().__init__()
        self._actions, self.results = list(actions), list[Result]()
        self._deadline = time.monotonic() + LOOK_SECONDS

    def look(self) -> None:
        assert time.monotonic() < self._deadline, "the cluster does not get there"
        if self._actions and self._actions[0]() is not False:
            del self._actions[0]

    def ended(self, result: Result) -> None:
        self.results.append(result)


@slow
def test_slurm_cells_that_are_preempted_or_lose_their_node_go_on(two_nodes: Cluster, tmp_path: Path) -> None:
    path, hold = held_grid_file(tmp_path, {}, [1, 2])
    running: dict[str, str] = {}  # job by node

    def both_hold() -> bool:
        running.update({node: job for job, (state, node) in two_nodes.jobs().items() if state == "RUNNING"})
        return len(running) == 2 and recorded_iterations(tmp_path / "out") >= 2

    def waits(node: str) -> bool:
        return two_nodes.jobs()[running[node]][0] == "PENDING"

    watcher = Acting(
        both_hold,
        lambda: two_nodes.ask("sbatch", "--partition=urgent", "--nodelist=n1", "--wrap=sleep 1", "--output=/dev/null"),
        lambda: waits("n1"),
        lambda: two_nodes.lose("n2"),
        lambda: two_nodes.state("n2") == "down" and waits("n2"),
        hold.unlink,
    )
    engine = Slurm(tmp_path / "jobs", 2, {"slurm_partition": "cells"})
    outcome = run_grid(load_grid(path), tmp_path / "out", engine, watcher)
    assert set(running) == {"n1", "n2"} and [result.exit_code for result in watcher.results] == [0, 0]
    assert [resumed(tmp_path / "out", cell) for cell in outcome.table["cell"]] == [1, 1]  # each went on once
    alone = run_grid(load_grid(path), tmp_path / "alone", Processes(1), ConsoleGrid())
    assert fingerprints(outcome) == fingerprints(alone)
    assert [resumed(tmp_path / "alone", cell) for cell in alone.table["cell"]] == [0, 0]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of scripts in place of Slurm's commands; they fail until `answer` gives them something to say."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in slurm.COMMANDS:
        answer(folder, name, "exit 1")
    answer(folder, "sinfo", "exit 0")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def answer(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("option", "missing", "said"),
    [
        ("--slurm slurm_partition=cpu", "answer", "the cluster does not answer (no route); wait"),
        ("--slurm slurm_partitoin=cpu", "", "jobs cannot be submitted (Unknown argument 'partitoin'"),
        ("--ray 127.0.0.1:1", "", "cannot be reached ([Errno 111] Connection refused); start it"),
        ("--ray local", "package", "--ray: needs ray"),
        ("--slurm a=b", "package", "--slurm: needs submitit"),
        ("--slurm a=b", "sbatch", "--slurm: sbatch is not installed here"),
    ],
)
def test_what_a_cluster_cannot_do_is_said_before_anything_is_written(
    commands: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    missing: str,
    said: str,
) -> None:
    if missing == "answer":
        answer(commands, "sinfo", "echo no route >&2; exit 1")
    if missing == "sbatch":
        monkeypatch.setenv("PATH", str(tmp_path))
    if missing == "package":
        for module in ("ray_tasks", "slurm"):
            monkeypatch.setattr(f"ppo_repro.grids.{module}.find_spec", lambda name: None)
    path = grid_file(tmp_path, {}, [1])
    assert _run(["grid", str(path), "--out", str(tmp_path / "out"), *option.split()]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and said in lines[0] and not (tmp_path / "out").exists(), lines


def test_a_job_that_vanished_is_lost_and_one_of_a_silent_cluster_is_not(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(slurm, "SETTLE_SECONDS", 0.1)
    order = Order("seed=1", str(tmp_path / "cell"), "language", 1)
    (tmp_path / "cell").mkdir()
    answer(commands, "squeue", "echo down for the moment >&2; exit 1")
    results = slurm._until_ended({"7_0": order}, tmp_path)
    assert [next(results) for _ in range(5)] == [None] * 5
    answer(commands, "squeue", "echo 7_0")
    assert [next(results) for _ in range(5)] == [None] * 5
    answer(commands, "squeue", "exit 0")
    (lost,) = [result for result in results if result is not None]
    assert lost.exit_code == LOST and "job 7_0 ended without a word" in lost.message
    assert last_result(tmp_path / "cell") == lost and state_of(tmp_path / "cell") == "interrupted"


def test_a_job_that_is_gone_has_the_result_of_its_cell(commands: Path, tmp_path: Path) -> None:
    order = Order("seed=1", str(tmp_path), "language", 1)
    (tmp_path / LOG).write_text("error: no such thing\n")
    answer(commands, "squeue", "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")
    expected = finish_cell(order, 2, 1.0)
    results = [result for result in slurm._until_ended({"7": order}, tmp_path) if result is not None]
    assert results == [expected] and expected.message == "error: no such thing"
