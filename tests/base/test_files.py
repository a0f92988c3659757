"""Files and folders that are written whole."""

from __future__ import annotations

from pathlib import Path

from ppo_repro.base.files import whole_folder


def test_a_folder_is_replaced_whole_whatever_killed_processes_left(tmp_path: Path) -> None:
    for name in ("it", "it.tmp", "it.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").touch()
    with whole_folder(tmp_path / "it") as folder:
        assert (tmp_path / "it" / "old").exists()
        (folder / "new").touch()
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "it", tmp_path / "it" / "new"]
