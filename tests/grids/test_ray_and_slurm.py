"""Grids on a real Slurm and a real Ray of two nodes: preemption, lost nodes, scancel; and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.grids import ray_and_slurm
from ppo_repro.grids.cell import LOST, Order, cell_state, last_result, record_result
from ppo_repro.grids.executor import Processes
from ppo_repro.grids.grid import run_grid
from ppo_repro.grids.ray_and_slurm import Slurm
from ppo_repro.grids.spec import load_grid
from tests.grids.slurm import Cluster, cluster
from tests.grids.small_grids import fingerprints, grid_file, held_grid_file, resumed
from tests.support.cli import Cli
from tests.support.runs import recorded_iterations
from tests.support.waiting import until

slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


def act(*actions: Callable[[], object]) -> None:
    """Do each action until it returns something else than False, one after the other."""
    for action in actions:
        until(lambda this=action: this() is not False, "the cluster gets there", 180.0)  # type: ignore[misc]


@slow
def test_slurm_cells_of_two_processes_that_are_preempted_or_lose_their_node_go_on(
    two_nodes: Cluster, tmp_path: Path
) -> None:
    path, hold = held_grid_file(tmp_path, {}, [1, 2])
    running: dict[str, str] = {}  # job by node

    def both_hold() -> bool:
        running.update({node: job for job, (state, node) in two_nodes.jobs().items() if state == "RUNNING"})
        cells = (tmp_path / "out" / "g" / "cells").iterdir()
        return len(running) == 2 and min(map(recorded_iterations, cells)) > 0

    def waits(node: str) -> bool:
        return two_nodes.jobs()[running[node]][0] == "PENDING"

    actions = (
        both_hold,
        lambda: two_nodes.ask("sbatch", "--partition=urgent", "--nodelist=n1", "--wrap=sleep 1", "--output=/dev/null"),
        lambda: waits("n1"),
        lambda: two_nodes.lose("n2"),
        lambda: two_nodes.state("n2") == "down" and waits("n2"),
        hold.unlink,
    )
    engine = Slurm(tmp_path / "jobs", 2, {"slurm_partition": "cells"})
    with ThreadPoolExecutor(1) as thread:
        acting = thread.submit(act, *actions)
        outcome = run_grid(load_grid(path), tmp_path / "out", engine, processes=2)
        acting.result()
    assert set(running) == {"n1", "n2"}
    assert [resumed(tmp_path / "out", cell) for cell in outcome.table["cell"]] == [1, 1]  # each went on once
    alone = run_grid(load_grid(path), tmp_path / "alone", Processes(1))
    assert fingerprints(outcome) == fingerprints(alone)
    assert [resumed(tmp_path / "alone", cell) for cell in alone.table["cell"]] == [0, 0]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of scripts in place of Slurm's commands; they fail until `answer` gives them something to say."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ray_and_slurm.COMMANDS:
        answer(folder, name, "exit 1")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def answer(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("option", "missing", "said"),
    [
        ("--slurm slurm_partitoin=cpu", "", "jobs cannot be submitted (Unknown argument 'partitoin'"),
        ("--ray 127.0.0.1:1", "", "cannot be reached ([Errno 111] Connection refused); start it"),
        ("--ray local", "package", "--ray: needs ray"),
        ("--slurm a=b", "package", "--slurm: needs submitit"),
        ("--slurm a=b", "sbatch", "--slurm: sbatch is not installed here"),
    ],
)
def test_what_a_cluster_cannot_do_is_said_before_anything_is_written(
    commands: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, option: str, missing: str, said: str
) -> None:
    if missing == "sbatch":
        monkeypatch.setenv("PATH", str(tmp_path))
    if missing == "package":
        monkeypatch.setattr(ray_and_slurm, "find_spec", lambda name: None)
    path = grid_file(tmp_path, {}, [1])
    assert said in cli.refusal("grid", path, "--out", tmp_path / "out", *option.split())
    assert not (tmp_path / "out").exists()


def test_a_cell_keeps_its_result_if_no_job_can_be_submitted(commands: Path, tmp_path: Path) -> None:
    order = Order("seed=1", str(tmp_path), 1)
    before = record_result(order, LOST, "its machine is gone")
    with pytest.raises(UserError, match="jobs cannot be submitted"):
        next(Slurm(tmp_path / "jobs", 1).run([order]))
    assert last_result(tmp_path) == before


def test_a_job_that_vanished_is_lost_and_one_of_a_silent_cluster_is_not(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_and_slurm, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(ray_and_slurm, "SETTLE_SECONDS", 0.1)
    order = Order("seed=1", str(tmp_path / "cell"), 1)
    (tmp_path / "cell").mkdir()
    # silent, then in the queue, then gone
    script = f"echo x >> {tmp_path}/n; case $(wc -l < {tmp_path}/n) in ?) exit 1;; 1?) echo 7_0;; esac"
    answer(commands, "squeue", script)
    (lost,) = ray_and_slurm._until_ended({"7_0": order}, tmp_path)
    assert len((tmp_path / "n").read_text().split()) > 19
    assert lost.exit_code == LOST
    assert "job 7_0 ended without a word" in lost.message
    assert last_result(tmp_path / "cell") == lost
    assert cell_state(tmp_path / "cell") == "interrupted"


def test_a_job_that_is_gone_has_the_result_of_its_cell(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_and_slurm, "POLL_SECONDS", 0.01)
    order = Order("seed=1", str(tmp_path), 1)
    answer(commands, "squeue", "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")
    expected = record_result(order, 2, "error: no such thing")
    assert list(ray_and_slurm._until_ended({"7": order}, tmp_path)) == [expected]
