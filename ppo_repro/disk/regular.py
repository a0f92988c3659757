"""Reading regular files only: a pipe can keep a reader waiting for ever, and a device need not end."""

from __future__ import annotations

import errno
import stat
from io import BufferedReader
from pathlib import Path

NOT_REGULAR = "not a regular file"


def require_regular(path: Path) -> None:
    """Raise OSError, whose strerror says so, where `path` is missing, a folder, or any other thing than a file."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; OSError as `require_regular`, or where it cannot be read."""
    require_regular(path)
    return path.open("rb")


def read_regular(path: Path) -> bytes:
    """The content of a regular file; OSError as `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def read_beginning(path: Path, size: int) -> bytes:
    """At most the first `size` bytes of a regular file; OSError as `open_regular`."""
    with open_regular(path) as file:
        return file.read(size)
