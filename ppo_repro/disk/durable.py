"""Writing files so that after a kill or on a full disk they hold the old or the new content, nothing in between."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ppo_repro.errors import UserError


def atomic_write(path: Path, data: bytes | memoryview) -> None:
    """Replace a file completely or leave it as it was; raises UserError with path and reason."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        # never through a symbolic link, which could lead out of the folder
        with open(temporary, "wb", opener=_without_links) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        # the first error is the one to report
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _unwritable(path, error) from error


def write_at(path: Path, size: int, data: bytes) -> None:
    """Cut a file to its first `size` bytes, append `data`, and flush it to the disk.

    The first `size` bytes are safe at any moment. The appended ones are not, so they count only once something written
    later says so. Raises UserError with path and reason; the file then has `size` bytes.
    """
    try:
        # unbuffered, so that closing does not try a failed write again
        with open(path, "r+b", buffering=0, opener=_without_links) as file:
            if os.fstat(file.fileno()).st_size < size:
                raise UserError(f"{path}: was cut off meanwhile; let one process at a time write a run")
            try:
                file.truncate(size)
                file.seek(size)
                remaining = memoryview(data)
                while remaining:
                    remaining = remaining[file.write(remaining) :]
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(size)
                raise
    except OSError as error:
        raise _unwritable(path, error) from error


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut; raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _without_links(path: str, flags: int) -> int:
    # nor into a pipe, which would wait for a reader
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _unwritable(path: Path, error: OSError) -> UserError:
    reason = error.strerror or str(error)
    return UserError(f"{path}: cannot be written ({reason}); make room there or choose another --out")
