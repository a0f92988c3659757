"""After a kill or a power cut, between any two changes of the disk, a run has every iteration that it reported."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from ppo_repro.base import files
from ppo_repro.base.files import atomic_write
from ppo_repro.buffers import Coefficients, ReturnStatistics
from ppo_repro.records import manifest
from ppo_repro.records.writer import RunWriter
from ppo_repro.runs import checkpoint
from ppo_repro.runs.checkpoint import NO_STATE, Checkpoint
from ppo_repro.runs.resume import remove_unfinished
from ppo_repro.runs.verify_files import verify_files
from tests.support import synthetic_run
from tests.support.disk import Disk, State, recorded

ITERATIONS = 2
RUN = "seed1/run"
NO_RETURNS = ReturnStatistics(0, 0.0, 0.0)


def test_a_file_is_synced_before_it_gets_its_name_and_then_its_folder(tmp_path: Path) -> None:
    with recorded(tmp_path) as disk:
        atomic_write(tmp_path / "a", b"content")
    assert disk.calls == ["fsync a.tmp", "replace a.tmp a", "fsync ."]
    assert {state.content["a"] for state in disk.states if "a" in state.content} == {b"content"}


def test_without_fsync_a_power_cut_leaves_an_empty_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(files, "sync", lambda path: None)
    with recorded(tmp_path) as disk:
        atomic_write(tmp_path / "a", b"content")
    assert {state.content["a"] for state in disk.states if "a" in state.content} == {b"content", b"con", b""}


def saved(iteration: int, chain: str) -> Checkpoint:
    weights, coefficients = {"weight": torch.full((3,), float(iteration))}, Coefficients(0.1, 0.2, 0.0, NO_RETURNS)
    return Checkpoint(iteration, chain, {"prompts": "task"}, weights, {}, NO_STATE, NO_STATE, coefficients)


def record(run_dir: Path, disk: Disk | None = None) -> None:
    """Write a run, or go on with what is there: tables, side tables, a note, a checkpoint an iteration, one kept."""
    if not run_dir.exists():
        synthetic_run.create_run(run_dir)
    found = manifest.load(run_dir)
    contents = verify_files(run_dir, found)
    if found.status == "complete":
        return
    remove_unfinished(run_dir, found, contents)
    written = RunWriter(run_dir)
    written.note("accuracy.json", {"tokens": found.num_iterations})  # another content in a process that goes on
    for iteration in range(found.num_iterations, ITERATIONS):
        tables = synthetic_run.random_tables(iteration, 2)
        if iteration:  # the folder of this table is made now
            beside = next(table for table in manifest.side_tables_of(written.head) if table.name == "evaluations")
            tables[beside.name] = synthetic_run.random_table(beside, iteration, 2, np.random.default_rng(iteration))
        written.append(iteration, tables)
        if disk is not None:
            disk.promised = iteration + 1
        name = f"checkpoints/iteration-{iteration + 1:06d}.safetensors"
        digest = checkpoint.save(saved(iteration + 1, written.head.fingerprint), run_dir / name)
        kept = {file: of for file, of in written.head.files.items() if not file.startswith("checkpoints/")}
        written.keep_only({**kept, name: digest})
    written.finish(synthetic_run.FINAL, {})


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody cuts the power of this machine: a test waits for no disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def require_whole(state: State, folder: Path) -> Path:
    """What is promised is there and undamaged; the run folder, if it is there."""
    run_dir = state.write(folder) / RUN
    where = f"{state.how}, before {state.before}"
    if not run_dir.exists():
        assert state.promised == 0, where
    else:
        assert manifest.load(run_dir).num_iterations >= state.promised, where
        verify_files(run_dir)
    return run_dir


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_goes_on_after_a_kill_or_a_power_cut_between_any_two_calls(tmp_path: Path, every: int) -> None:
    """Every state is whole; of `every` so many one goes on, and becomes the run that nothing happened to."""
    (tmp_path / "disk").mkdir()
    with recorded(tmp_path / "disk") as disk:
        record(tmp_path / "disk" / RUN, disk)
    expected = manifest.load(tmp_path / "disk" / RUN)
    assert expected.status == "complete"
    assert disk.promised == ITERATIONS
    for number, state in enumerate(disk.states):
        run_dir = require_whole(state, tmp_path / str(number))
        if number % every == 0:
            record(run_dir)
            assert manifest.load(run_dir).fingerprint == expected.fingerprint, state.how
            assert verify_files(run_dir).unfinished == (), state.how
    print(f"\n{len(disk.calls)} calls, {len(disk.states)} states of the disk")


@pytest.mark.usefixtures("no_sync")
def test_a_process_that_goes_on_may_be_killed_too(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with recorded(tmp_path / "disk") as disk:
        record(tmp_path / "disk" / RUN, disk)
    half = next(state for state in disk.states if state.promised == 1 and state.how == "killed")
    require_whole(half, tmp_path / "half")
    with recorded(tmp_path / "half") as again:
        record(tmp_path / "half" / RUN, again)
    killed = [state for state in again.states if state.how == "killed"]  # what is there already counts as not synced
    assert len(killed) > 5
    for number, state in enumerate(killed):
        require_whole(state, tmp_path / str(number))
