"""A run folder is made once, grows by whole iterations, and says so when anything in it is damaged."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.errors import UserError
from ppo_repro.records import digests, iteration_log, manifest, reader, schema, writer
from ppo_repro.records.iteration_log import IterationEntry, TableEntry
from tests.support import synthetic_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_run.make_run(tmp_path_factory.mktemp("run") / "a", iterations=3)


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "b"))


def refused(message: str, call: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(UserError, match=message) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)


def test_a_run_is_made_once(run: Path) -> None:
    before = sorted(run.rglob("*"))
    refused("a: exists already; choose another --out, or use `ppo-repro show", synthetic_run.start_run, run)
    refused(
        "manifest.json: the file .*manifest.json is in the way",
        synthetic_run.start_run,
        run / manifest.FILE_NAME,
    )
    below_a_file = run / manifest.FILE_NAME / "new"
    refused("manifest.json is in the way; choose another --out", synthetic_run.start_run, below_a_file)
    deeper = below_a_file / "run"
    refused(r"cannot be made \(Not a directory\); choose another --out", synthetic_run.start_run, deeper)
    assert sorted(run.rglob("*")) == before


def full_disk(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    current = synthetic_run.start_run(tmp_path / "a")
    current = writer.append_iteration(tmp_path / "a", current, 0, synthetic_run.random_tables(0, 4))
    monkeypatch.setattr(os, "fsync", full_disk)
    tables = synthetic_run.random_tables(1, 4)
    advice = r"cannot be written \(No space left on device\); "
    refused(advice, writer.append_iteration, tmp_path / "a", current, 1, tables)
    refused(advice, writer.mark, tmp_path / "a", current, "failed")
    refused(advice, writer.finish, tmp_path / "a", current, {})
    refused(advice, synthetic_run.start_run, tmp_path / "b")
    assert not (tmp_path / "b").exists()
    assert list(tmp_path.rglob("*.tmp")) == []
    assert manifest.load_head(tmp_path / "a") == current and manifest.load(tmp_path / "a").num_iterations == 1


def test_status_and_fingerprint(tmp_path: Path) -> None:
    run_dir = tmp_path / "a"
    current = synthetic_run.start_run(run_dir)
    assert (current.status, current.fingerprint) == ("running", digests.FINGERPRINT_SEED)
    current = writer.append_iteration(run_dir, current, 0, synthetic_run.random_tables(0, 4))
    assert current.fingerprint == manifest.load(run_dir).iterations[0].chain
    current = writer.mark(run_dir, current, "interrupted")
    said = "the run is interrupted after 1 recorded iterations; finish it with `ppo-repro resume"
    refused(said, reader.open_manifest, run_dir)
    refused("the run is interrupted", reader.read_tokens, run_dir)
    assert len(reader.read_tokens(run_dir, allow_incomplete=True)) == 4
    with pytest.raises(ValueError, match="the run is interrupted; mark it running"):
        writer.append_iteration(run_dir, current, 1, synthetic_run.random_tables(1, 4))
    stale, current = current, writer.mark(run_dir, current, "running")
    refused("the manifest changed meanwhile", writer.mark, run_dir, stale, "failed")
    done = writer.finish(run_dir, current, synthetic_run.FINAL)
    assert done.fingerprint != current.fingerprint and done == manifest.head_of(reader.open_manifest(run_dir))
    assert list(done.final) == list(synthetic_run.FINAL)
    with pytest.raises(ValueError, match="the run is complete"):
        writer.mark(run_dir, done, "running")


def test_only_the_next_iteration_of_this_run_is_appended(tmp_path: Path) -> None:
    run_dir = tmp_path / "a"
    current = synthetic_run.start_run(run_dir)
    tables = synthetic_run.random_tables(0, 4)
    with pytest.raises(ValueError, match="iteration 1 cannot follow 0"):
        writer.append_iteration(run_dir, current, 1, tables)
    with pytest.raises(ValueError, match="table sequences: row 0 is not of iteration 0"):
        writer.append_iteration(run_dir, current, 0, synthetic_run.random_tables(1, 4))
    with pytest.raises(ValueError, match=r"has tables \['sequences'\]"):
        writer.append_iteration(run_dir, current, 0, {"sequences": tables["sequences"]})
    with pytest.raises(ValueError, match="table tokens: has another schema"):
        writer.append_iteration(run_dir, current, 0, {**tables, "tokens": tables["steps"]})
    assert list(run_dir.rglob("*.parquet")) == []


@pytest.mark.parametrize("last_table", [table.name for table in schema.TABLES])
def test_a_crash_loses_at_most_the_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_table: str) -> None:
    run_dir = tmp_path / "a"
    current = synthetic_run.start_run(run_dir)
    current = writer.append_iteration(run_dir, current, 0, synthetic_run.random_tables(0, 4))
    replace = os.replace

    def crash(source: Path, target: Path) -> None:
        replace(source, target)
        if target.parent.name == last_table:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "replace", crash)
        writer.append_iteration(run_dir, current, 1, synthetic_run.random_tables(1, 4))
    found = manifest.load_head(run_dir)
    assert found == current and manifest.load(run_dir).num_iterations == 1
    assert reader.read_tokens(run_dir, allow_incomplete=True)["iteration"].tolist() == [0] * 4
    refused("no iteration 1; recorded are 0 to 0", reader.read_arrow, run_dir, last_table, 1)
    found = writer.append_iteration(run_dir, found, 1, synthetic_run.random_tables(1, 4))
    assert writer.finish(run_dir, found, {}).status == "complete"
    assert len(reader.read_tokens(run_dir)) == 8


def test_half_files_are_not_accepted(copy: Path) -> None:
    path = manifest.table_path(copy, "tokens", 1)
    content = path.read_bytes()
    path.with_name(path.name + ".tmp").write_bytes(content[:100])
    assert len(reader.read_tokens(copy)) == 36
    for size in (0, 4, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        refused(r"tokens/iteration=000001\.parquet: has another SHA-256", reader.read_tokens, copy)
    path.unlink()
    refused(r"tokens/iteration=000001\.parquet: is missing", reader.read_tokens, copy)
    path.mkdir()
    refused("cannot be read", reader.read_tokens, copy)


@pytest.fixture(scope="module")
def earlier(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run as manifest version 2 had it, which knows the digests of the values only."""
    copy = Path(shutil.copytree(run, tmp_path_factory.mktemp("earlier") / "run"))
    synthetic_run.as_version_2(copy)
    return copy


@given(st.sampled_from([table.name for table in schema.TABLES]), st.data())
def test_a_flipped_bit_in_an_earlier_run_is_refused_or_changes_nothing(
    earlier: Path, table_name: str, data: st.DataObject
) -> None:
    # parts of a Parquet file say nothing about the values: the writer's name, unused metadata
    run = earlier
    path = manifest.table_path(run, table_name, 1)
    whole = path.read_bytes()
    expected = synthetic_run.random_tables(1, 12)[table_name]
    position, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(whole)
    damaged[position] ^= 1 << bit
    try:
        path.write_bytes(damaged)
        found = reader.read_arrow(run, table_name, 1)
    except UserError as error:
        assert "damaged" in str(error) and "\n" not in str(error)
    else:
        for column in {t.name: t for t in schema.TABLES}[table_name].columns:
            values = [
                digests.column_digest(column.kind, t.column(column.name), nullable=True) for t in (found, expected)
            ]
            assert values[0] == values[1]
    finally:
        path.write_bytes(whole)


def test_another_table_in_its_place(copy: Path) -> None:
    other = manifest.table_path(copy, "steps", 2)
    content = other.read_bytes()
    shutil.copy(manifest.table_path(copy, "steps", 1), other)
    refused("steps/iteration=000002.parquet: has another SHA-256", reader.read_steps, copy)
    other.write_bytes(content)


def test_another_table_in_its_place_in_an_earlier_run(copy: Path) -> None:
    synthetic_run.as_version_2(copy)
    path = manifest.table_path(copy, "tokens", 1)
    shutil.copy(manifest.table_path(copy, "tokens", 0), path)
    refused("does not match the manifest; the file was changed or damaged", reader.read_tokens, copy)
    shutil.copy(manifest.table_path(copy, "steps", 1), path)
    refused("has columns iteration, epoch, ", reader.read_tokens, copy)
    data = pq.ParquetFile(manifest.table_path(copy, "updates", 1)).read()
    wide = data.set_column(5, "new_logprobs", data.column("new_logprobs").cast("double"))
    pq.write_table(wide, manifest.table_path(copy, "updates", 1))
    refused("column new_logprobs holds double, expected float32", reader.read_updates, copy)


def edit(run_dir: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = run_dir / manifest.FILE_NAME
    tree = json.loads(path.read_text())
    change(tree)
    synthetic_run.save_tree(run_dir, tree)


def edit_log(run_dir: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Edit the iterations, sign their lines again and make the manifest count them, as somebody would on purpose."""
    path = run_dir / iteration_log.FILE_NAME
    trees = [json.loads(line) for line in path.read_text().splitlines()]
    change(trees)
    entries = [IterationEntry(t["iteration"], {k: TableEntry(**v) for k, v in t["tables"].items()}, t["chain"])
               for t in trees]  # fmt: skip
    path.write_bytes(b"".join(map(iteration_log.to_line, entries)))
    edit(run_dir, lambda t: t.update(synthetic_run.log_fields(entries)))


EDITS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda t: t["final"].update(eval_accuracy=0.75), "fingerprint = "),
    (lambda t: t.update(status="running"), "status = 'running' but final results"),
    (lambda t: t.update(status="done"), "status: Input should be"),
    (lambda t: t.update(fingerprint="00"), "fingerprint = '00' does not follow"),
    (lambda t: t.update(more=1), "more: Extra inputs"),
    (lambda t: t.pop("inputs"), "inputs: Field required"),
    (lambda t: t.pop("schema_version"), "schema_version = None: this ppo_repro reads 2"),
    (lambda t: t.update(schema_version=1), "schema_version = 1: this ppo_repro reads 2"),
    (lambda t: t.update(schema_version=7), "schema_version = 7: this ppo_repro reads 2"),
    (lambda t: t.update(manifest_version=4), "manifest_version = 4: this ppo_repro reads 1 and 2 and 3"),
    (lambda t: t.update(log_digest="0" * 64), "iterations.jsonl: has another digest than the manifest says"),
    (lambda t: t.pop("manifest_version"), "iterations: Field required"),
    (lambda t: t.update(num_iterations=2), "holds 3 whole lines in .* bytes, the manifest says 2"),
    (lambda t: t.update(num_iterations=-1), "num_iterations: Input should be"),
    (lambda t: t.update(log_bytes=t["log_bytes"] - 1), "holds 3 whole lines in|holds 2 whole lines in"),
]
LOG_EDITS: list[tuple[Callable[[list[dict[str, Any]]], Any], str]] = [
    (lambda t: t[1].update(chain="0" * 64), "iterations.jsonl: chain of iteration 1 = '000.* does not follow"),
    (lambda t: t[1]["tables"]["tokens"].update(digest="0"), "iterations.jsonl: chain of iteration 1"),
    (lambda t: t.pop(), "manifest.json: fingerprint = "),
    (lambda t: t.pop(0), "iterations.jsonl: iterations.0 is iteration 1, expected 0"),
    (lambda t: t[0]["tables"].pop("steps"), "iterations.jsonl: iteration 0 lists tables"),
]


@pytest.mark.parametrize(("change", "message"), EDITS, ids=[message for _, message in EDITS])
def test_a_changed_manifest_is_refused(copy: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    edit(copy, change)
    refused(message, manifest.load, copy)


def test_any_other_byte_of_the_manifest_is_refused(copy: Path) -> None:
    path = copy / manifest.FILE_NAME
    content = path.read_bytes()
    assert manifest.to_json(manifest.load_head(copy)).encode() == content
    for position in range(0, len(content), 5):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        refused("manifest.json: (does not match its own|has no digest of its own|is not )", manifest.load_head, copy)
    for other in (content[:-1], content + b"\n", content.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + content):
        path.write_bytes(other)
        refused("manifest.json: (does not match its own|is not valid JSON)", manifest.load, copy)


def test_a_manifest_cannot_pass_for_an_earlier_one(copy: Path) -> None:
    tree = json.loads((copy / manifest.FILE_NAME).read_text())
    del tree["sha256"]
    for version in (2, 3):
        (copy / manifest.FILE_NAME).write_text(json.dumps({**tree, "manifest_version": version}))
        refused("manifest.json: has no digest of its own", manifest.load, copy)


@pytest.mark.parametrize(("change", "message"), LOG_EDITS, ids=[message for _, message in LOG_EDITS])
def test_changed_iterations_are_refused(
    copy: Path, change: Callable[[list[dict[str, Any]]], Any], message: str
) -> None:
    edit_log(copy, change)
    refused(message, manifest.load, copy)


def test_changed_rows_are_refused_with_the_table(copy: Path) -> None:
    edit_log(copy, lambda t: t[1]["tables"]["tokens"].update(rows=11))
    refused(r"tokens/iteration=000001\.parquet: does not match the manifest", reader.read_tokens, copy)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"null"])
def test_what_is_no_manifest(tmp_path: Path, content: bytes) -> None:
    refused("nothing: no such folder; give the folder of a run", manifest.load, tmp_path / "nothing")
    (tmp_path / "a").mkdir()
    refused("a: holds no manifest.json", manifest.load, tmp_path / "a")
    (tmp_path / "a" / manifest.FILE_NAME).write_bytes(content)
    refused("is not valid JSON|is not the manifest of a run", manifest.load, tmp_path / "a")


SCALARS = st.one_of(st.floats(), st.integers(), st.text(st.characters(codec="utf-8")))


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), SCALARS, max_size=4))
def test_final_results_survive_json(final: dict[str, Any]) -> None:
    blank = manifest.Head(
        schema_version=schema.SCHEMA_VERSION,
        status="complete",
        config_digest="",
        inputs={},
        num_iterations=0,
        log_bytes=0,
        final=final,
        fingerprint="",
    )
    with TemporaryDirectory() as folder:
        manifest.save(blank, Path(folder))
        found = manifest.load_head(Path(folder))
    assert [(k, type(v), digests.scalar_digest(v)) for k, v in found.final.items()] == [
        (k, type(v), digests.scalar_digest(v)) for k, v in final.items()
    ]


def test_final_results_have_simple_types(tmp_path: Path) -> None:
    current = synthetic_run.start_run(tmp_path / "a")
    wrong: list[Any] = [True, None, np.float32(0.5), np.int64(3), [1]]
    for value in wrong:
        with pytest.raises(ValueError, match="final"):
            writer.finish(tmp_path / "a", current, {"accuracy": value})
    assert manifest.load_head(tmp_path / "a") == current
