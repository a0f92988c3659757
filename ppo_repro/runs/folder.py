"""What a run folder needs from the file system: one writer at a time, and folders that are whole or absent."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ppo_repro.errors import UserError
from ppo_repro.records.manifest import sync_folder

LOCK_NAME = "lock"


@contextmanager
def only_writer(run_dir: Path) -> Iterator[None]:
    """Hold the run's advisory lock (flock); UserError where another process has it. Readers need none.

    The kernel drops the lock when its process ends, however it ends, so a dead run is never taken for a live one.
    """
    path = run_dir / LOCK_NAME
    try:
        file = path.open("w")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); make the run folder writable") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{run_dir}: another process is writing this run; wait for it or end it first") from error
        except OSError as error:
            reason = f"{path}: cannot be locked ({error.strerror})"
            raise UserError(f"{reason}; keep runs on a file system with flock") from error
        yield


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which then takes the place of `folder` on disk, whole and durable, or not at all.

    UserError where writing fails; whatever was at `folder` stays until everything new is on disk.
    """
    temporary = folder.with_name(folder.name + ".tmp")
    try:
        if temporary.exists():  # of a process that was killed
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.rglob("*"):
            _sync(path)
        sync_folder(temporary)
        remove_folder(folder)
        os.replace(temporary, folder)
        sync_folder(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{folder}: cannot be written ({reason}); make room there") from error


def remove_folder(folder: Path) -> None:
    """Remove a folder if it is there, under another name first, so that no half of it is left; raises OSError."""
    doomed = folder.with_name(folder.name + ".removed")
    if doomed.exists():  # of a process that was killed
        shutil.rmtree(doomed)
    if folder.exists():
        os.replace(folder, doomed)
        sync_folder(folder.parent)
        shutil.rmtree(doomed)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
