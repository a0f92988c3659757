"""Every file of a run folder cut short, removed or with a bit flipped: refused by name, or what is read is the same."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ppo_repro.config.files import load_config, read_tree
from ppo_repro.errors import PromiseBroken, UserError
from ppo_repro.records import digests, manifest, reader
from ppo_repro.runs.run import run_folder
from ppo_repro.runs.verify import verify
from ppo_repro.watcher import Silent
from tests.support.language import resume, run
from tests.support.paths import TINY


class Interrupted(Silent):
    """Ends a run after its second iteration."""

    def iteration(self, done: int, total: int, figures: str) -> None:
        if done == 2:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of three iterations, a checkpoint after each."""
    config = load_config(TINY, ["ppo.iterations=3", "checkpoints.every=1"])
    out = tmp_path_factory.mktemp("part")
    with suppress(KeyboardInterrupt):
        run(config, out, Interrupted())
    return run_folder(config, out)


@pytest.fixture(scope="module")
def whole(part: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = Path(shutil.copytree(part, tmp_path_factory.mktemp("whole") / "run"))
    resume(run_dir, Silent())
    return run_dir


def files_of(run_dir: Path) -> list[Path]:
    return sorted(path.relative_to(run_dir) for path in run_dir.rglob("*") if path.is_file())


def contents(run_dir: Path) -> Any:
    """All that readers hand out: the manifest, and the digests of the values of every table."""
    found = manifest.load(run_dir)
    tables = manifest.tables_of(found)
    values = {}
    for entry in found.iterations:
        for table in tables:
            data = reader.read_recorded(run_dir, found, table, entry.iteration, verify=False)
            for column in table.columns:  # the times too, which are in no digest of the manifest
                bits = digests.column_digest(column.kind, data.column(column.name), nullable=column.nullable)
                values[table.name, entry.iteration, column.name] = bits
    return found, values, load_config(run_dir / "config.yaml")


def refusal(run_dir: Path) -> str:
    """What `verify` says; empty where it finds nothing."""
    try:
        verify(run_dir)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


def names(said: str, run_dir: Path, name: Path) -> bool:
    # the manifest is named by what does not fit it any more, a file that is listed by the list
    return str(run_dir / name) in said or name.name in said or (name.name == "manifest.json" and bool(said))


def test_a_whole_folder_is_whole(whole: Path, part: Path) -> None:
    assert refusal(whole) == refusal(part) == ""
    found = verify(whole)
    assert (found.iterations, found.tables, found.checkpoints, found.model_folders) == (3, 18, 2, 3)
    kinds = {path.suffix for path in files_of(whole)}
    assert kinds == {"", ".json", ".jsonl", ".yaml", ".parquet", ".safetensors"} and len(files_of(whole)) == 51


def test_any_file_cut_short_or_gone_is_named(whole: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "run"))
    for name in files_of(whole):
        path, content = copy / name, (whole / name).read_bytes()
        for size in sorted({0, len(content) // 2, len(content) - 1} - {len(content), -1}):
            path.write_bytes(content[:size])
            said = refusal(copy)
            if not said and size == len(content) - 1:  # the last line break of a JSON or YAML file
                assert content[-1:] == b"\n"
            else:
                assert names(said, copy, name), f"{name} cut to {size}: {said!r}"
        path.unlink()
        assert names(refusal(copy), copy, name) or name.name == "lock", f"{name} removed"
        path.write_bytes(content)
    assert refusal(copy) == ""


def flips(content: bytes, count: int, generator: random.Random) -> Iterator[bytes]:
    for _ in range(min(count, len(content) * 8)):
        damaged = bytearray(content)
        damaged[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        yield bytes(damaged)


def test_a_flipped_bit_anywhere_is_named_or_changes_nothing(whole: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "run"))
    expected, generator = contents(whole), random.Random(0)
    refused = unnoticed = 0
    for name in files_of(whole):
        if name.name == "lock":  # empty
            continue
        content = (whole / name).read_bytes()
        for damaged in flips(content, 15 if name.suffix == ".jsonl" or name.name == "manifest.json" else 3, generator):
            (copy / name).write_bytes(damaged)
            if said := refusal(copy):
                assert names(said, copy, name), f"{name}: {said}"
                refused += 1
            else:  # white space of JSON and YAML, what Parquet says beside the values
                assert name.suffix in {".parquet", ".json", ".yaml"} and contents(copy) == expected, name
                unnoticed += 1
        (copy / name).write_bytes(content)
    assert refused > 3 * unnoticed > 0, (refused, unnoticed)


def test_a_run_of_a_version_with_fewer_fields_is_verified_and_resumed(part: Path, whole: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(part, tmp_path / "run"))
    text = (copy / "config.yaml").read_text()
    assert "  mismatch_sigma: null\n" in text
    (copy / "config.yaml").write_text(text.replace("  mismatch_sigma: null\n", ""))
    tree = json.dumps(read_tree(copy / "config.yaml"), sort_keys=True, separators=(",", ":"))
    older = json.loads((copy / "manifest.json").read_text())
    del older["notes"]
    older["config_digest"] = hashlib.sha256(tree.encode()).hexdigest()[:12]
    (copy / "manifest.json").write_text(json.dumps(older))
    assert refusal(copy) == ""
    resume(copy, Silent())
    assert refusal(copy) == "" and manifest.load(copy).fingerprint == manifest.load(whole).fingerprint
    assert set(manifest.load(copy).notes) == {"resumed-001.json", "times.json"}


@pytest.mark.slow
def test_going_on_from_any_damaged_file(part: Path, whole: Path, tmp_path: Path) -> None:
    """Resumed with one file cut in half: refused by name with nothing changed, or the same results as ever."""
    refused = set()
    for number, name in enumerate(files_of(part)):
        copy = Path(shutil.copytree(part, tmp_path / str(number)))
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content[: len(content) // 2])
        before = (copy / "manifest.json").read_bytes()
        try:
            resume(copy, Silent())
        except (UserError, PromiseBroken) as error:
            assert names(str(error), copy, name), f"{name}: {error}"
            assert (copy / "manifest.json").read_bytes() == before
            refused.add(name.as_posix())
            continue
        assert manifest.load(copy).iterations == manifest.load(whole).iterations
        assert manifest.load(copy).fingerprint == manifest.load(whole).fingerprint
        assert names(refusal(copy), copy, name) or name.name == "lock" or "iteration-000001" in name.parts, name
    assert {
        "manifest.json",
        "iterations.jsonl",
        "config.yaml",
        "checkpoints/iteration-000002/policy.safetensors",
    } <= refused


PLACES = ["lock", "manifest.json.tmp", "records/tokens", "records/late.parquet", "checkpoints", "checkpoints/final.tmp"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("target", ["folder", "folder/file", "nowhere"])
def test_a_link_out_of_the_folder_is_not_followed(part: Path, tmp_path: Path, place: str, target: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("mine")
    copy = Path(shutil.copytree(part, tmp_path / "run"))
    link = copy / place
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path / target)
    with pytest.raises(UserError, match=rf"{place}: is a symbolic link; put what it points to in its place"):
        resume(copy, Silent())
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["file"]
    assert (tmp_path / "folder" / "file").read_text() == "mine" and not (tmp_path / "nowhere").exists()
