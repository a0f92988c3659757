"""A damaged or half-written file of a run is refused in one line that names it, and never read."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import MANIFEST
from ppo_repro.config.files import load_config
from ppo_repro.config.inputs import run_folder
from ppo_repro.models.load import load_folder
from ppo_repro.records import manifest, reader, schema
from ppo_repro.records.diff import first_difference
from ppo_repro.runs.verify_files import verify_files
from tests.support import synthetic_run
from tests.support.cli import Cli, one_line
from tests.support.language import run
from tests.support.paths import TINY
from tests.support.resume import Stopped

DAMAGES = int(os.environ.get("DAMAGES", "24"))


KINDS = ("flipped", "truncated", "zeroed", "appended", "emptied", "deleted", "swapped", "duplicated", "FIFO", "folder")


@dataclass(frozen=True)
class Damage:
    """What was done to a folder; `names` are the files of which one has to be named."""

    kind: str
    names: tuple[Path, ...]

    def is_named(self, said: str) -> bool:
        """Whether a message names the damage; that of a list of digests shows at a file of its folder."""
        listed = {name.parent.as_posix() for name in self.names if name.name == "SHA256SUMS"}
        return any(name.name in said for name in self.names) or any(folder in said for folder in listed)


def changed(content: bytes, kind: str, generator: random.Random) -> bytes:
    at = generator.randrange(max(1, len(content)))
    if kind == "flipped":
        return content[:at] + bytes([content[at] ^ 1 << generator.randrange(8)]) + content[at + 1 :]
    if kind == "truncated":
        return content[:at]
    if kind == "zeroed":  # at least one byte that was no zero
        at = generator.choice([index for index, byte in enumerate(content) if byte])
        end = min(len(content), at + generator.randint(1, 512))
        return content[:at] + bytes(end - at) + content[end:]
    if kind == "appended":
        return content + generator.choice([b"\n", b" ", b"\0", generator.randbytes(generator.randint(1, 64))])
    return b""


@contextmanager
def damaged(folder: Path, kind: str, generator: random.Random) -> Iterator[Damage]:
    """Do damage of a kind to some file of the folder, and undo it at the end."""
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    # a file without content, such as a lock, loses nothing
    full = [name for name in names if (folder / name).stat().st_size]
    name = generator.choice(names if kind in ("appended", "duplicated") else full)
    path, content = folder / name, (folder / name).read_bytes()
    copy = path.with_name(f"{path.stem}-copy{path.suffix}")
    other = generator.choice([n for n in names if (folder / n).read_bytes() != content])
    before = {path: content, folder / other: (folder / other).read_bytes()}
    touched = (name,)
    if kind in ("deleted", "FIFO", "folder"):
        path.unlink()
        make = {"FIFO": os.mkfifo, "folder": os.mkdir}.get(kind)
        if make is not None:
            make(path)
    elif kind == "duplicated":
        copy.write_bytes(content)
        touched = (copy.relative_to(folder),)
    elif kind == "swapped":
        path.write_bytes(before[folder / other])
        (folder / other).write_bytes(content)
        touched = (name, other)
    else:
        path.write_bytes(changed(content, kind, generator))
    try:
        yield Damage(kind, touched)
    finally:
        copy.unlink(missing_ok=True)
        if kind == "folder":
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        for where, bytes_before in before.items():
            where.write_bytes(bytes_before)


def frames(run_dir: Path) -> list[pd.DataFrame]:
    return [reader.read_table(table.name, run_dir) for table in schema.TABLES]


def refusal(run_dir: Path) -> str:
    """What `verify` says; empty where it finds nothing."""
    try:
        verify_files(run_dir)
    except UserError as error:
        return str(error)
    return ""


def test_any_damage_is_named_and_not_read(tmp_path: Path) -> None:
    run_dir = synthetic_run.make_run(tmp_path / "a")
    whole, generator, seen = Path(shutil.copytree(run_dir, tmp_path / "whole")), random.Random(0), Counter[str]()
    expected = frames(run_dir)
    assert refusal(run_dir) == ""
    assert first_difference(whole, run_dir) is None  # the control
    for number in range(DAMAGES):
        with damaged(run_dir, KINDS[number % len(KINDS)], generator) as damage:
            said = refusal(run_dir)
            assert damage.is_named(said), (damage, said)
            assert "\n" not in said, (damage, said)
            try:
                assert first_difference(whole, run_dir) is None, damage
                assert all(a.equals(b) for a, b in zip(frames(run_dir), expected, strict=True)), damage
                seen["not used"] += 1
            except UserError as error:
                assert damage.is_named(str(error)), (damage, error)
                seen["refused"] += 1
    assert refusal(run_dir) == "", seen
    assert min(seen["refused"], seen["not used"]) > 3, seen


@pytest.mark.slow
def test_no_command_uses_what_is_damaged(cli: Cli, tmp_path: Path) -> None:
    """And a value model and an adapter, damaged or not, are no model."""
    lora = "lora={rank: 2, alpha: 4}"
    config = load_config(TINY, ["ppo.iterations=3", "checkpoints.every=1", "model.warm_start_steps=3", lora])
    whole, _ = run(config, tmp_path / "whole")
    with suppress(KeyboardInterrupt):
        run(config, tmp_path / "part", Stopped(2))
    part, generator, seen = run_folder(config, tmp_path / "part"), random.Random(1), Counter[str]()
    for number in range(DAMAGES):
        with damaged(whole, KINDS[number % len(KINDS)], generator) as damage:
            code, _, err = cli("verify", whole)
            assert code == 2, (damage, err)
            assert damage.is_named(one_line(err)), (damage, err)
            code, _, err = cli("diff", whole, whole)
            seen[f"diff {code}"] += 1
            assert code == 0 or (code == 2 and damage.is_named(one_line(err))), (damage, err)
            said = one_line(cli("fork", whole, "--set", "ppo.iterations=4", "--out", tmp_path / "forks")[2])
            assert said.startswith("error: "), (damage, said)
            assert damage.is_named(said), (damage, said)
        copy = Path(shutil.copytree(part, tmp_path / "copy"))
        with damaged(copy, KINDS[number % len(KINDS)], generator) as damage:
            before = (copy / MANIFEST).read_bytes()
            code, _, err = cli("resume", copy)
            if code == 0:  # a checkpoint that is removed costs time alone
                assert damage.kind == "deleted", (damage, err)
                assert damage.names[0].name.startswith("iteration-"), (damage, err)
                assert manifest.load(copy).fingerprint == manifest.load(whole).fingerprint
                seen["removed checkpoint"] += 1
            else:
                assert code == 2, (damage, err)
                assert "error: " in err, (damage, err)
                assert (copy / MANIFEST).read_bytes() == before, damage
                seen["refused"] += 1
        shutil.rmtree(copy)
    assert min(seen["diff 2"], seen["refused"]) > 3, seen
    for name in ("value_model", "adapter"):
        with pytest.raises(UserError):
            load_folder(whole / "checkpoints" / name)


def test_a_file_that_the_run_did_not_write_is_named(tmp_path: Path) -> None:
    run_dir = synthetic_run.make_run(tmp_path / "a")
    for name in ("notes.txt", "records/tokens/iteration=000007.parquet", "checkpoints/final/model.bin"):
        path = run_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
        assert f"{path}: is no file of this run" in refusal(run_dir)
        path.unlink()
    for name in ("label.json.tmp", "report.html"):  # the first one is of a process that was killed
        (run_dir / name).write_text("x")
    assert verify_files(run_dir).uncovered == ("label.json.tmp", "report.html")


def test_what_a_kill_leaves_is_told_apart(tmp_path: Path) -> None:
    run_dir = synthetic_run.make_run(tmp_path / "a", iterations=3)
    synthetic_run.cut_back(run_dir, 2, "running")
    (run_dir / "records" / "tokens" / "iteration=000002.parquet").write_text("half")
    notes = ("accuracy.json", "card.json", "resumed-001.json", "times.json.tmp")
    for name in ("manifest.json.tmp", *notes):
        (run_dir / name).write_text("half")
    found = verify_files(run_dir)
    expected = ["manifest.json.tmp", *notes, "records/tokens/iteration=000002.parquet"]
    assert list(found.unfinished) == sorted(expected)
    assert found.unfinished_line > 0
    assert len(frames_of_incomplete(run_dir)) == 24


def frames_of_incomplete(run_dir: Path) -> pd.DataFrame:
    with pytest.raises(UserError, match="the run is running after 2 recorded iterations"):
        reader.read_tokens(run_dir)
    return reader.read_tokens(run_dir, allow_incomplete=True)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"null"])
def test_what_is_no_manifest_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(UserError, match=r"manifest\.json: is (not valid JSON|not the manifest of a run)") as caught:
        manifest.load(tmp_path)
    assert "\n" not in str(caught.value)
