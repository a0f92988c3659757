"""The log of iterations: the manifest says what counts, a kill leaves only what does not, damage is named."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro import files
from ppo_repro.errors import UserError
from ppo_repro.records import iteration_log, manifest, reader, writer
from ppo_repro.records.iteration_log import IterationEntry, TableEntry
from tests.support import synthetic_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two iterations, not complete."""
    folder = tmp_path / "a"
    current = synthetic_run.start_run(folder)
    for iteration in range(2):
        current = writer.append_iteration(folder, current, iteration, synthetic_run.random_tables(iteration, 4))
    return folder


def log_of(run_dir: Path) -> Path:
    return run_dir / iteration_log.FILE_NAME


def append(run_dir: Path, iteration: int) -> manifest.Head:
    tables = synthetic_run.random_tables(iteration, 4)
    return writer.append_iteration(run_dir, manifest.load_head(run_dir), iteration, tables)


TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
ENTRIES = st.builds(
    IterationEntry,
    st.integers(0, 2**40),
    st.dictionaries(TEXT, st.builds(TableEntry, st.integers(0, 2**40), TEXT, TEXT), max_size=3),
    TEXT,
)


@given(ENTRIES, st.data())
def test_a_line_is_read_as_it_was_written_and_refused_with_any_other_bit(
    entry: IterationEntry, data: st.DataObject
) -> None:
    line = iteration_log.to_line(entry)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert iteration_log.from_line(line[:-1]) == entry
    assert json.loads(line)["tables"] == {k: dataclasses.asdict(v) for k, v in entry.tables.items()}
    damaged = bytearray(line[:-1])
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError):
        iteration_log.from_line(bytes(damaged))


def test_a_line_by_hand() -> None:
    content = b'{"iteration":3,"tables":{"tokens":{"rows":7,"digest":"ab","file_digest":"ef"}},"chain":"cd"}'
    sha256 = "9128f60843db37e93bfec2784fb2a6264f52d79fca8d157a989aa63c708a2516"  # of `printf '%s' CONTENT | sha256sum`
    line = content[:-1] + b',"sha256":"' + sha256.encode() + b'"}'
    entry = IterationEntry(3, {"tokens": TableEntry(7, "ab", "ef")}, "cd")
    assert iteration_log.to_line(entry) == line + b"\n" and iteration_log.from_line(line) == entry
    assert iteration_log.from_line(line).tables["tokens"].file_digest == "ef"


@pytest.mark.parametrize("left", [1, 100, None])
def test_a_torn_last_line_is_no_iteration(run_dir: Path, left: int | None) -> None:
    """A process killed before the manifest counted the line: it is not read, and written over."""
    before = manifest.load_head(run_dir)
    append(run_dir, 2)
    whole = log_of(run_dir).read_bytes()
    manifest.save(before, run_dir)
    log_of(run_dir).write_bytes(whole[: None if left is None else before.log_bytes + left])
    assert manifest.load(run_dir).num_iterations == 2
    assert set(reader.read_tokens(run_dir, allow_incomplete=True)["iteration"]) == {0, 1}
    append(run_dir, 2)
    assert log_of(run_dir).read_bytes() == whole and manifest.load(run_dir).num_iterations == 3


def test_what_is_longer_than_a_line_is_written_over_too(run_dir: Path) -> None:
    with log_of(run_dir).open("ab") as file:
        file.write(bytes(10_000))
    append(run_dir, 2)
    assert manifest.load(run_dir).num_iterations == 3
    assert log_of(run_dir).stat().st_size == manifest.load_head(run_dir).log_bytes


@pytest.mark.parametrize("at", ["log", "manifest"])
def test_a_kill_before_either_write_leaves_two_iterations(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    expected = manifest.load(run_dir)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(*((files, "write_at") if at == "log" else (manifest, "save")), killed)
        append(run_dir, 2)
    assert (log_of(run_dir).stat().st_size > expected.log_bytes) == (at == "manifest")
    assert manifest.load(run_dir) == expected
    append(run_dir, 2)
    assert manifest.load(run_dir).iterations[:2] == expected.iterations


def test_an_iteration_is_on_the_disk_before_the_manifest_counts_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    append(run_dir, 2)
    log = synced.index(iteration_log.FILE_NAME)
    assert synced.index("manifest.json.tmp") > log > synced.index("iteration=000002.parquet.tmp")
    assert synced.count(iteration_log.FILE_NAME) == 1 and log > max(
        i for i, name in enumerate(synced) if name.endswith(".parquet.tmp")
    )


def test_every_cut_and_any_flipped_bit_is_named(run_dir: Path) -> None:
    content, generator = log_of(run_dir).read_bytes(), random.Random(0)
    middle = content.index(b"\n") + 1
    for size in (0, 1, middle - 1, middle, len(content) - 1):
        log_of(run_dir).write_bytes(content[:size])
        with pytest.raises(UserError, match=r"iterations.jsonl: holds .* the manifest says 2 in"):
            manifest.load(run_dir)
    for _ in range(200):
        damaged = bytearray(content)
        damaged[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        log_of(run_dir).write_bytes(damaged)
        with pytest.raises(UserError, match=r"iterations.jsonl: (line [12]: |holds )") as caught:
            manifest.load(run_dir)
        assert "\n" not in str(caught.value)
    log_of(run_dir).unlink()
    with pytest.raises(UserError, match=r"iterations.jsonl: cannot be read \(No such file"):
        manifest.load(run_dir)


COUNTS = {
    "nothing": (lambda content: b"", "0 whole lines in 0 bytes"),
    "a list": (lambda content: b"[]\n", "1 whole line in 3 bytes"),
    "no line break": (lambda content: b"[]", "0 whole lines in 2 bytes"),
    "half a line": (lambda content: content[:-1], "1 whole line in {less} bytes"),
    "one break more": (lambda content: b"\n" + content, "2 whole lines in {size} bytes"),
    "breaks alone": (lambda content: b"\n" * len(content), "{size} whole lines in {size} bytes"),
}  # fmt: skip


@pytest.mark.parametrize("damage", COUNTS)
def test_what_a_log_holds_is_counted(run_dir: Path, damage: str) -> None:
    change, said = COUNTS[damage]
    content = log_of(run_dir).read_bytes()
    log_of(run_dir).write_bytes(change(content))
    counts = said.format(size=len(content), less=len(content) - 1)
    with pytest.raises(UserError, match=f"iterations.jsonl: holds {counts}, the manifest says 2 in {len(content)};"):
        manifest.load(run_dir)


def test_nothing_is_appended_to_a_log_that_was_cut_off(run_dir: Path) -> None:
    content = log_of(run_dir).read_bytes()
    log_of(run_dir).write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"iterations.jsonl: was cut off meanwhile"):
        append(run_dir, 2)
    assert log_of(run_dir).read_bytes() == content[:-1]


def test_a_link_in_its_place_is_not_written_through(run_dir: Path, tmp_path: Path) -> None:
    log_of(run_dir).rename(tmp_path / "theirs")
    content = (tmp_path / "theirs").read_bytes()
    log_of(run_dir).symlink_to(tmp_path / "theirs")
    with pytest.raises(UserError, match="Too many levels of symbolic links"):
        append(run_dir, 2)
    assert (tmp_path / "theirs").read_bytes() == content


def test_a_disk_that_is_full_takes_nothing_of_a_line(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, fsync = log_of(run_dir).read_bytes(), os.fsync

    def full(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(iteration_log.FILE_NAME):
            raise OSError(28, os.strerror(28))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"iterations.jsonl: cannot be written \(No space left on device\); make room"):
        append(run_dir, 2)
    assert log_of(run_dir).read_bytes() == content


def test_what_a_process_keeps_and_rewrites_does_not_grow(tmp_path: Path) -> None:
    current = synthetic_run.start_run(tmp_path / "a")
    sizes = []
    for iteration in range(10):
        current = writer.append_iteration(tmp_path / "a", current, iteration, synthetic_run.random_tables(iteration, 1))
        assert not hasattr(current, "iterations")
        sizes.append((tmp_path / "a" / manifest.FILE_NAME).stat().st_size)
    # one more digit of a number, no more
    assert max(sizes) - min(sizes) <= 4 and (tmp_path / "a" / manifest.FILE_NAME).stat().st_nlink == 1


def as_version_1(run_dir: Path) -> None:
    """What earlier versions wrote: the iterations inside manifest.json."""
    whole = manifest.load(run_dir)
    tree: dict[str, Any] = json.loads(manifest.to_json(whole))
    for name in ("manifest_version", "num_iterations", "log_bytes", "files", "log_digest", "sha256"):
        del tree[name]
    del tree["preparation"], tree["ending"]
    synthetic_run.as_version_2(run_dir)
    lines = log_of(run_dir).read_text().splitlines()
    tree["iterations"] = [{k: v for k, v in json.loads(line).items() if k != "sha256"} for line in lines]
    (run_dir / manifest.FILE_NAME).write_text(json.dumps(tree))
    log_of(run_dir).unlink()


def test_a_run_of_an_earlier_version_is_read_and_not_gone_on_with(run_dir: Path, tmp_path: Path) -> None:
    expected = manifest.load(run_dir)
    old = Path(shutil.copytree(run_dir, tmp_path / "old"))
    as_version_1(old)
    found = manifest.load(old)
    assert (found.iterations, found.fingerprint) == (expected.iterations, expected.fingerprint)
    assert manifest.load_head(old).num_iterations == 2
    assert reader.read_tokens(old, allow_incomplete=True).equals(reader.read_tokens(run_dir, allow_incomplete=True))
    said = "manifest_version = 1: this ppo_repro writes 3; finish the run with the version that began it"
    with pytest.raises(UserError, match=said):
        append(old, 2)
    with pytest.raises(UserError, match=said):
        writer.mark(old, manifest.load_head(old), "running")


OLD_EDITS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda t: t["iterations"].pop(), "manifest.json: fingerprint = "),
    (lambda t: t["iterations"][1].update(chain="0" * 64), "manifest.json: chain of iteration 1"),
    (lambda t: t.update(iterations=3), "manifest.json: iterations: Input should be"),
]


@pytest.mark.parametrize(("change", "message"), OLD_EDITS, ids=[message for _, message in OLD_EDITS])
def test_damage_to_an_earlier_manifest_is_named(
    run_dir: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    as_version_1(run_dir)
    tree = json.loads((run_dir / manifest.FILE_NAME).read_text())
    change(tree)
    (run_dir / manifest.FILE_NAME).write_text(json.dumps(tree))
    for load in (manifest.load, manifest.load_head):
        with pytest.raises(UserError, match=message):
            load(run_dir)
