"""Iterations written beside the computation: in order, durable before the next, errors raised where they matter."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ppo_repro.disk import durable
from ppo_repro.errors import UserError
from ppo_repro.records import manifest, writer
from ppo_repro.records.writer import appending
from tests.support import synthetic_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    synthetic_run.create_run(tmp_path / "run")
    return tmp_path / "run"


def test_iterations_come_out_as_if_appended_one_by_one(run_dir: Path, tmp_path: Path) -> None:
    tables = [synthetic_run.random_tables(i, 7) for i in range(4)]
    other = tmp_path / "other"
    synthetic_run.create_run(other)
    expected = manifest.load_head(other)
    with appending(run_dir, manifest.load(run_dir)) as appender:
        for i, one in enumerate(tables):
            appender.start(i, one)
            expected = writer.append_iteration(other, expected, i, one)
        assert appender.settle() == expected
    assert manifest.load(run_dir) == manifest.load(other)


def test_the_caller_goes_on_while_one_is_written_and_waits_before_the_next(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, append, begun = threading.Event(), writer.append_iteration, []

    def slow(folder: Path, current: manifest.Head, iteration: int, tables: object) -> manifest.Head:
        begun.append((iteration, threading.current_thread() is threading.main_thread()))
        assert release.wait(30)
        return append(folder, current, iteration, tables)  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "append_iteration", slow)
    with appending(run_dir, manifest.load(run_dir)) as appender:
        appender.start(0, synthetic_run.random_tables(0, 3))
        # here only because `start` did not wait for the disk
        assert manifest.load(run_dir).iterations == ()
        release.set()
        appender.start(1, synthetic_run.random_tables(1, 3))
        assert len(manifest.load(run_dir).iterations) >= 1  # the first was durable before the second began
    assert begun == [(0, False), (1, False)]
    assert len(manifest.load(run_dir).iterations) == 2


def test_an_error_of_the_disk_is_raised_at_the_next_call(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: object) -> None:
        raise UserError(f"{path}: cannot be written (no space left); make room there")

    with pytest.raises(UserError, match="no space left"), appending(run_dir, manifest.load(run_dir)) as appender:
        with monkeypatch.context() as patched:
            patched.setattr(durable, "atomic_write", full)
            appender.start(0, synthetic_run.random_tables(0, 3))
            appender.leave()
        appender.start(1, synthetic_run.random_tables(1, 3))
    assert manifest.load(run_dir).iterations == ()


def test_an_interrupted_block_keeps_what_it_had_begun_to_write(run_dir: Path) -> None:
    with pytest.raises(KeyboardInterrupt), appending(run_dir, manifest.load(run_dir)) as appender:
        appender.start(0, synthetic_run.random_tables(0, 3))
        raise KeyboardInterrupt
    assert len(manifest.load(run_dir).iterations) == 1
