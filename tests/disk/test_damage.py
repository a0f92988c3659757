"""Every file of a run folder cut short, removed or added: refused by name. `test_damage_anywhere.py` draws others."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from ppo_repro.config.files import load_config, read_tree
from ppo_repro.errors import UserError
from ppo_repro.records import manifest
from ppo_repro.runs.run import run_folder
from ppo_repro.runs.verify import verify
from ppo_repro.watcher import Silent
from tests.support import synthetic_run
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


def refusal(run_dir: Path) -> str:
    """What `verify` says; empty where it finds nothing."""
    try:
        verify(run_dir)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


def names(said: str, run_dir: Path, name: Path) -> bool:
    # the list of a folder is named by the file that does not fit it any more
    return str(run_dir / name) in said or name.name in said or (name.name == "SHA256SUMS" and bool(said))


def test_a_whole_folder_is_whole(whole: Path, part: Path) -> None:
    assert refusal(whole) == refusal(part) == ""
    found = verify(whole)
    assert (found.iterations, found.tables, found.checkpoints, found.model_folders) == (3, 18, 2, 3)
    assert (found.unfinished, found.uncovered, found.manifest_version) == ((), (), manifest.VERSION)
    kinds = {path.suffix for path in files_of(whole)}
    assert kinds == {"", ".json", ".jsonl", ".yaml", ".parquet", ".safetensors"} and len(files_of(whole)) == 51


def test_any_file_cut_short_or_gone_is_named(whole: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "run"))
    for number, name in enumerate(files_of(whole)):
        path, content = copy / name, (whole / name).read_bytes()
        if number % 3 and content:
            path.write_bytes(content[: (0, len(content) // 2, len(content) - 1)[number // 3 % 3]])
        else:
            path.unlink()
        # the lock holds nothing, and is made again where it is needed
        assert names(refusal(copy), copy, name) or name.name == "lock", name
        path.write_bytes(content)
    assert refusal(copy) == ""


def test_a_file_that_the_run_did_not_write_is_named(whole: Path, part: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "run"))
    strangers = ["a", "iterations.jsonl.tmp", "resumed-002.json", "records/tokens/iteration=000003.parquet"]
    strangers += ["checkpoints/final/a", "checkpoints/final/a/b", "checkpoints/other/config.json"]
    strangers += ["checkpoints/iteration-000003/a", "checkpoints/reference/a"]
    for stranger in strangers:
        (copy / stranger).parent.mkdir(exist_ok=True)
        (copy / stranger).write_text("1")
        said = refusal(copy)
        assert str(copy / stranger) in said or f"does not list {Path(stranger).name};" in said, (stranger, said)
        (copy / stranger).unlink()
    (copy / "report.html").write_text("made from the records")
    assert verify(copy).uncovered == ("report.html",)
    unfinished = Path(shutil.copytree(part, tmp_path / "part"))
    strangers = ["a", "records/tokens/iteration=000003.parquet", "checkpoints/other/config.json"]
    for stranger in (*strangers, "checkpoints/reference/a/b", "checkpoints/reference/a/b.tmp"):
        (unfinished / stranger).parent.mkdir(exist_ok=True)
        (unfinished / stranger).write_text("1")
        assert str(unfinished / stranger) in refusal(unfinished)
        with pytest.raises(UserError, match=re.escape(str(unfinished / stranger))):
            resume(unfinished, Silent())
        (unfinished / stranger).unlink()


def test_what_a_kill_leaves_is_told_apart_and_removed(part: Path, whole: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(part, tmp_path / "run"))
    left = ["accuracy.json.tmp", "checkpoints/final/config.json", "checkpoints/final.tmp/config.json"]
    left += ["records/tokens/iteration=000002.parquet", "resumed-001.json"]
    for name in left:
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text("half")
    with (copy / "iterations.jsonl").open("ab") as log:
        log.write(b"half a line")
    found = verify(copy)
    assert (found.unfinished, found.unfinished_line) == (tuple(sorted(left)), 11)
    assert found.lines()[1].endswith(", resumed-001.json, the last 11 bytes of iterations.jsonl")
    resume(copy, Silent())
    assert verify(copy).unfinished == () and files_of(copy) == files_of(whole)
    assert manifest.load(copy).fingerprint == manifest.load(whole).fingerprint


def test_a_run_of_an_earlier_version_is_verified_as_far_as_it_goes(whole: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "run"))
    synthetic_run.as_version_2(copy)
    found = verify(copy)
    assert (found.manifest_version, found.model_folders) == (2, 3)
    assert "manifest version 2: the values of tables, " in found.lines()[1]
    for name in ("records/tokens/iteration=000001.parquet", "times.json", "checkpoints/final/config.json"):
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content[:-1])
        assert names(refusal(copy), copy, Path(name))
        (copy / name).write_bytes(content)


def test_a_run_of_a_version_with_fewer_fields_is_verified_and_resumed(part: Path, whole: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(part, tmp_path / "run"))
    text = (copy / "config.yaml").read_text()
    assert "  mismatch_sigma: null\n" in text
    (copy / "config.yaml").write_text(text.replace("  mismatch_sigma: null\n", ""))
    fields = read_tree(copy / "config.yaml")
    del fields["records"]  # which is in no digest of a configuration
    tree = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    older = json.loads((copy / "manifest.json").read_text())
    older["config_digest"] = hashlib.sha256(tree.encode()).hexdigest()[:12]
    older["files"]["config.yaml"] = hashlib.sha256((copy / "config.yaml").read_bytes()).hexdigest()
    synthetic_run.save_tree(copy, older)
    assert refusal(copy) == ""
    resume(copy, Silent())
    assert refusal(copy) == "" and manifest.load(copy).fingerprint == manifest.load(whole).fingerprint


@pytest.mark.slow
def test_nothing_goes_on_from_a_damaged_file(part: Path, tmp_path: Path) -> None:
    """Resumed with one file cut in half: refused by name with nothing changed."""
    for number, name in enumerate(files_of(part)):
        copy = Path(shutil.copytree(part, tmp_path / str(number)))
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content[: len(content) // 2])
        if not content:  # the lock
            continue
        before = {path: (copy / path).read_bytes() for path in files_of(copy)}
        with pytest.raises(UserError) as caught:
            resume(copy, Silent())
        assert names(str(caught.value), copy, name) and "\n" not in str(caught.value), f"{name}: {caught.value}"
        assert {path: (copy / path).read_bytes() for path in files_of(copy)} == before


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
