"""Files that the user names, mostly with --out: only an earlier one of the same kind is replaced there."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

from ppo_repro.disk.durable import atomic_write
from ppo_repro.disk.regular import read_beginning
from ppo_repro.errors import UserError

_OTHERS = {stat.S_ISDIR: "is a folder", stat.S_ISLNK: "is a symbolic link", stat.S_ISREG: ""}


@dataclass(frozen=True)
class OwnKind:
    """A kind of file that a command writes and may write again."""

    what: str  # as in `an earlier report`
    beginnings: tuple[bytes, ...]  # a file of this kind begins with one of them; those of earlier versions too


# as every drawing of ours begins
PICTURE = OwnKind("picture", (b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ',))


def check_replaceable(path: Path, kind: OwnKind, option: str = "--out") -> None:
    """Raise UserError unless `path` is free, or a file of this kind: a slip in `option` must not cost a file."""
    try:
        mode = path.lstat().st_mode
        problem = next((words for test, words in _OTHERS.items() if test(mode)), "is no regular file")
        if not problem and not read_beginning(path, max(map(len, kind.beginnings))).startswith(kind.beginnings):
            problem = f"is not an earlier {kind.what}"
    except FileNotFoundError:
        return
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    if problem:
        allowed = f"must be a new file or an earlier {kind.what}"
        raise UserError(f"{option} {path}: {problem}; {allowed}; choose another {option}")


def write_over_earlier(path: Path, kind: OwnKind, data: bytes, option: str = "--out") -> None:
    """Write a file atomically where `check_replaceable` allows it; UserError, and nothing written, where not."""
    check_replaceable(path, kind, option)
    atomic_write(path, data)


def write_csv_over_earlier(path: Path, text: str, option: str) -> None:
    """`write_over_earlier` of a CSV file: one with the same columns is an earlier one."""
    header = text.partition("\n")[0] + "\n"
    write_over_earlier(path, OwnKind("table with these columns", (header.encode(),)), text.encode(), option)
