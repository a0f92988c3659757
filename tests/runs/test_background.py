"""Iterations written beside the computation: in order, durable before the next, errors raised where they matter."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from ppo_repro import files
from ppo_repro.errors import UserError
from ppo_repro.records import digests, iteration_log, manifest, reader, writer
from ppo_repro.runs.lifetime import appending
from ppo_repro.watcher import Silent
from tests.support import synthetic_run
from tests.support.cli import Cli
from tests.support.language import rerun, resume, run
from tests.support.runs import small_config


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
    release, append, begun = threading.Event(), writer.append_iterations, []

    def slow(folder: Path, current: manifest.Head, iteration: int, tables: object) -> manifest.Head:
        begun.append((iteration, threading.current_thread() is threading.main_thread()))
        assert release.wait(30)
        return append(folder, current, iteration, tables)  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "append_iterations", slow)
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
            patched.setattr(files, "atomic_write", full)
            appender.start(0, synthetic_run.random_tables(0, 3))
            appender.leave()
        appender.start(1, synthetic_run.random_tables(1, 3))
    assert manifest.load(run_dir).iterations == ()


def test_an_interrupted_block_keeps_what_it_had_begun_to_write(run_dir: Path) -> None:
    with pytest.raises(KeyboardInterrupt), appending(run_dir, manifest.load(run_dir)) as appender:
        appender.start(0, synthetic_run.random_tables(0, 3))
        raise KeyboardInterrupt
    assert len(manifest.load(run_dir).iterations) == 1


def streamed_pages(run_dir: Path, verify: reader.Verification) -> Iterator[pd.DataFrame]:
    return reader.stream(run_dir, "tokens", columns=COLUMNS, rows=3, verify=verify, allow_incomplete=True)


FIVE = "model.warm_start_steps=0", "ppo.iterations=5"


class AfterTwo(Silent):
    """Ctrl-C as soon as two iterations are on disk."""

    def iteration(self, done: int, total: int, text: str) -> None:
        if done == 2:
            raise KeyboardInterrupt


HOW: tuple[reader.Verification, ...] = "contents", "pages"
COLUMNS = ["iteration", "token_id", "rollout_logprobs"]


def recorded(run_dir: Path, together: int, count: int = 7) -> manifest.Manifest:
    with appending(run_dir, manifest.load(run_dir), together) as appender:
        for i in range(count):
            appender.start(i, synthetic_run.random_tables(i, 5))
    return manifest.load(run_dir)


@pytest.mark.parametrize("together", [2, 3, 7, 50])
def test_iterations_in_one_file_are_read_as_those_in_their_own(run_dir: Path, tmp_path: Path, together: int) -> None:
    synthetic_run.create_run(tmp_path / "each")
    each, several = recorded(tmp_path / "each", 1), recorded(run_dir, together)
    assert several.fingerprint == each.fingerprint and several.iterations == each.iterations
    for table in manifest.tables_of(each):
        names = [path.name for path in sorted((run_dir / "records" / table.name).iterdir())]
        assert names == [f"iteration={first:06d}.parquet" for first in range(0, 7, together)]
        for i in range(7):
            asked = (tmp_path / "each", i), (run_dir, i), (run_dir, (i + 1) % 7)
            found = [digests.table_digest(table, reader.read_arrow(folder, table.name, k)) for folder, k in asked]
            assert found[0] == found[1] != found[2], "and not another iteration of the file"
    streamed = [
        [
            page.to_dict("list")
            for page in reader.stream(folder, "tokens", columns=COLUMNS, rows=3, verify=how, allow_incomplete=True)
        ]
        for folder in (tmp_path / "each", run_dir)
        for how in HOW
    ]
    assert str(streamed[0]) == str(streamed[1]) == str(streamed[2]) == str(streamed[3])


def test_one_damaged_byte_of_a_file_of_several_is_named_whatever_is_read(run_dir: Path) -> None:
    recorded(run_dir, 4)
    path = run_dir / "records" / "tokens" / "iteration=000004.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for i in (4, 5, 6):
        with pytest.raises(UserError, match=r"iteration=000004.parquet: has another SHA-256"):
            reader.read_arrow(run_dir, "tokens", i)
    assert reader.read_arrow(run_dir, "tokens", 3).num_rows > 0


def test_an_interrupted_block_writes_what_it_has_in_hand(run_dir: Path) -> None:
    with pytest.raises(KeyboardInterrupt), appending(run_dir, manifest.load(run_dir), 3) as appender:
        for i in range(5):
            appender.start(i, synthetic_run.random_tables(i, 3))
        assert appender.settle().num_iterations == 3, "two are in hand"
        raise KeyboardInterrupt
    assert len(manifest.load(run_dir).iterations) == 5


def test_a_log_that_places_an_iteration_in_a_file_nobody_began_is_refused(run_dir: Path) -> None:
    entries = recorded(run_dir, 3).iterations
    path, lines = run_dir / iteration_log.FILE_NAME, []
    for entry in entries:
        wrong = dataclasses.replace(entry, first_in_file=1 if entry.iteration == 4 else entry.first_in_file)
        lines.append(iteration_log.to_line(wrong))
    head = manifest.load_head(run_dir)
    digest = ""
    for line in lines:
        digest = iteration_log.extended(digest, line)
    path.write_bytes(b"".join(lines))
    sizes = {"log_bytes": sum(map(len, lines)), "log_digest": digest}
    manifest.save(manifest.Head(**{**dict(head), **sizes}), run_dir)
    with pytest.raises(UserError, match="iteration 4 lies in files of iteration 1, which others begin"):
        manifest.load(run_dir)


@pytest.mark.slow
def test_a_run_in_files_of_several_iterations_is_the_run(tmp_path: Path, cli: Cli) -> None:
    """Checkpoints, Ctrl-C and the end write what is in hand; all that reads a run reads this one."""
    usual = small_config(*FIVE)
    config = small_config(*FIVE, "records.iterations_per_file=2", "checkpoints.every=3")
    expected = manifest.load(run(usual, tmp_path / "usual", Silent())[0]).fingerprint
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path, AfterTwo())
    (folder,) = {path.parent for path in tmp_path.glob("small/**/manifest.json")}
    assert manifest.load(folder).num_iterations >= 2
    resume(folder, Silent(), ["records.iterations_per_file=4"])
    assert manifest.load(folder).fingerprint == expected
    files = [path.name for path in sorted((folder / "records" / "tokens").iterdir())]
    assert files[:2] == ["iteration=000000.parquet", "iteration=000002.parquet"] and len(files) < 5
    assert rerun(folder, Silent()).difference is None
    for command in ("verify", "replay"):
        code, _, err = cli(command, folder)
        assert code == 0, err
    assert cli("diff", folder, next((tmp_path / "usual").rglob("manifest.json")).parent)[0] == 0
