"""What --out names is replaced where it is an earlier file of the same kind, and nothing else is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ppo_repro.errors import UserError
from ppo_repro.files import OwnKind, check_replaceable, write_csv_over_earlier, write_over_earlier

KIND = OwnKind("report", (b"<new", b"<older format"))


def linked(path: Path) -> None:
    path.with_name("target").write_bytes(b"<new page>")
    path.symlink_to("target")


KEPT: dict[str, tuple[Callable[[Path], object], str]] = {
    "manifest": (lambda path: path.write_bytes(b'{"schema_version": 1}'), "is not an earlier report"),
    "empty": (lambda path: path.write_bytes(b""), "is not an earlier report"),
    "another page": (lambda path: path.write_bytes(b"<older page>"), "is not an earlier report"),
    "folder": (Path.mkdir, "is a folder"),
    "pipe": (os.mkfifo, "is no regular file"),
    "link": (linked, "is a symbolic link"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "is a symbolic link"),
    "device": (lambda path: path.symlink_to("/dev/full"), "is a symbolic link"),
}


@pytest.mark.parametrize("there", KEPT)
def test_what_is_not_ours_is_kept(tmp_path: Path, there: str) -> None:
    make, said = KEPT[there]
    path = tmp_path / "x"
    make(path)
    before = path.lstat()
    content = path.read_bytes() if path.is_file() else b""
    for call in (check_replaceable, lambda path, kind: write_over_earlier(path, kind, b"<new content>")):
        with pytest.raises(UserError) as caught:
            call(path, KIND)
        assert str(caught.value).startswith(f"--out {path}: {said}; must be a new file or an earlier report; choose")
        assert "\n" not in str(caught.value)
    assert path.lstat() == before and not (tmp_path / "x.tmp").exists()
    assert not path.is_file() or path.read_bytes() == content


@pytest.mark.parametrize("device", ["/dev/full", "/dev/null", "/dev/stdout"])
def test_a_device_is_kept(device: str) -> None:
    with pytest.raises(UserError, match=f"--out {device}: is (no regular file|a symbolic link); must be"):
        check_replaceable(Path(device), KIND)


@pytest.mark.parametrize("content", [None, b"<new", b"<new and more", b"<older format of a page"])
def test_what_is_ours_is_replaced(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "x").write_bytes(content)
    write_over_earlier(tmp_path / "x", KIND, b"<new content>")
    assert (tmp_path / "x").read_bytes() == b"<new content>"


def test_a_table_goes_over_one_with_the_same_columns_only(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    for text in ("a,b\n1,2\n", "a,b\n"):
        write_csv_over_earlier(path, text, "--csv")
        assert path.read_text() == text
    with pytest.raises(UserError, match=r"--csv .*x.csv: is not an earlier table with these columns; .* another --csv"):
        write_csv_over_earlier(path, "a,bc\n1,2\n", "--csv")
    assert path.read_text() == "a,b\n"
