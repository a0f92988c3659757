"""Which texts can be paths of this machine."""

from __future__ import annotations

import os

LONGEST_PATH = 3000  # bytes, which leaves room for the files of a run below what systems allow
LONGEST_NAME = 255  # bytes


def check_path(text: str) -> str:
    """The text; ValueError where no file of this machine can have this path."""
    if "\0" in text:
        raise ValueError("must be a path; no path has a NUL character")
    if "://" in text:
        raise ValueError("must be a path on this machine, not a URI")
    try:
        path = os.path.abspath(text).encode()
    except UnicodeEncodeError as error:
        raise ValueError("must be a path in UTF-8") from error
    if len(path) > LONGEST_PATH or max(map(len, path.split(b"/"))) > LONGEST_NAME:
        raise ValueError(
            f"must be a shorter path: at most {LONGEST_PATH} bytes as an absolute path, {LONGEST_NAME} for a name in it"
        )
    return text
