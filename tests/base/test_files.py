"""Files and folders that are written whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import check_sums, whole_file, whole_folder, write_sums


def test_a_folder_is_replaced_whole_whatever_killed_processes_left(tmp_path: Path) -> None:
    for name in ("it", "it.tmp", "it.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").touch()
    with whole_folder(tmp_path / "it") as folder:
        assert (tmp_path / "it" / "old").exists()
        (folder / "new").touch()
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "it", tmp_path / "it" / "new"]


def test_an_interrupted_file_leaves_the_old_one_alone(tmp_path: Path) -> None:
    (tmp_path / "it").write_text("old")
    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "it") as path:
        path.write_text("new")
        raise KeyboardInterrupt
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("it", "old")]


def test_sums_cover_folders_in_a_folder(tmp_path: Path) -> None:
    """transformers writes additional chat templates into a folder of the model's folder."""
    (tmp_path / "templates").mkdir()
    inner = tmp_path / "templates" / "tool_use.jinja"
    inner.write_text("a")
    write_sums(tmp_path)
    assert check_sums(tmp_path) == {"SHA256SUMS", "templates/tool_use.jinja"}
    (tmp_path / "templates" / "other.jinja").touch()
    with pytest.raises(UserError, match=r"does not list templates/other\.jinja"):
        check_sums(tmp_path)
    (tmp_path / "templates" / "other.jinja").unlink()
    inner.write_text("b")
    with pytest.raises(UserError, match=r"tool_use\.jinja: has another SHA-256"):
        check_sums(tmp_path)
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  ../secret\n")
    with pytest.raises(UserError, match="is not a list of SHA-256"):
        check_sums(tmp_path)


def test_a_folder_that_cannot_be_replaced_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "old").touch()
    replace = os.replace

    def refused(source: Path, target: Path) -> None:
        if source.name == "it.tmp":
            raise OSError("no rename")
        replace(source, target)

    monkeypatch.setattr("ppo_repro.base.files.os.replace", refused)
    with pytest.raises(UserError, match="no rename"), whole_folder(tmp_path / "it") as folder:
        (folder / "new").touch()
    assert [path.name for path in (tmp_path / "it").iterdir()] == ["old"]


def test_the_new_folder_has_its_name_before_the_old_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "old").touch()

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ppo_repro.base.files.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "it") as folder:
        (folder / "new").touch()
    assert (tmp_path / "it" / "new").exists()
    assert (tmp_path / "it.removed" / "old").exists()
