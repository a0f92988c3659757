"""Run folders on the file system: one writer at a time, and subfolders that are complete or absent."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ppo_repro.disk.durable import sync_folder
from ppo_repro.disk.regular import open_regular, read_regular
from ppo_repro.errors import UserError

LOCK_NAME = "lock"
SUMS_NAME = "SHA256SUMS"
_RESTORE = "restore it, or remove the sums if you changed the folder yourself"


@contextmanager
def only_writer(run_dir: Path) -> Iterator[None]:
    """Hold the run's advisory lock (flock); UserError where another process has it. Readers need no lock.

    The kernel releases the lock when its process ends, however it ends, so a dead run is never taken for a live one.
    """
    path = run_dir / LOCK_NAME
    try:
        # not through a link and not truncated: the file may not be one of our locks; nor is a pipe, which would wait
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.fdopen(os.open(path, flags, 0o666), "w")
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


def has_writer(run_dir: Path) -> bool:
    """Whether a process of this machine is writing the run. Where the lock cannot be read, nobody is known to."""
    try:
        descriptor = os.open(run_dir / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)  # and with it the lock


def require_new(run_dir: Path, manifest: str) -> None:
    """Raise UserError where something has the name of a run that is to begin. `manifest`: a file every run has."""
    if run_dir.is_dir() and not (run_dir / manifest).exists():
        raise UserError(
            f"{run_dir}: exists without {manifest}, and nothing in it is removed; restore that file, "
            "or move the folder away"
        )
    if run_dir.is_dir():
        raise UserError(
            f"{run_dir}: exists already; choose another --out, "
            f"or use `ppo-repro show {run_dir}`, `ppo-repro rerun {run_dir}` or `ppo-repro resume {run_dir}`"
        )
    if os.path.lexists(run_dir):
        raise UserError(f"{run_dir}: the file {run_dir} is in the way; choose another --out")


def check_links(run_dir: Path) -> None:
    """Raise UserError if a run folder contains a symbolic link, because writes could leave the folder through it."""
    for path in sorted(run_dir.rglob("*")):
        if path.is_symlink():
            raise UserError(f"{path}: is a symbolic link; put what it points to in its place")


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to fill, which then replaces `folder`, completely and durably or not at all.

    UserError where writing fails. The old `folder` stays until everything new is on disk.
    """
    temporary = folder.with_name(folder.name + ".tmp")
    try:
        if temporary.exists():  # left by a killed process
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


def file_digest(path: Path) -> str:
    """SHA-256 of a file, which is read in pieces: it may be as large as a model; raises OSError."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS over every file of a folder, in the format of `sha256sum -c`; raises OSError."""
    lines = [f"{file_digest(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / SUMS_NAME).write_text("".join(lines), encoding="utf-8")


def check_sums(folder: Path) -> set[str]:
    """The names that SHA256SUMS lists, its own too; UserError for the first file that it does not match or list.

    Without SHA256SUMS nothing is checked, and no name returned.
    """
    path = folder / SUMS_NAME
    if not path.exists():
        return set()
    listed = {SUMS_NAME}
    try:
        content = read_regular(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {_RESTORE}") from error
    for line in content.splitlines():
        digest, _, name = line.decode("utf-8", "replace").partition("  ")
        # a name that leads out of the folder was not written by `write_sums`
        if len(digest) != 64 or not name or Path(name).name != name:
            raise UserError(f"{path}: is not a list of SHA-256; {_RESTORE}")
        try:
            actual = file_digest(folder / name)
        except (OSError, ValueError) as error:
            raise UserError(f"{folder / name}: cannot be read, and {path} lists it; {_RESTORE}") from error
        if actual != digest:
            raise UserError(f"{folder / name}: has another SHA-256 than {path} says; {_RESTORE}")
        listed.add(name)
    # an additional file could change what is loaded, and a truncated SHA256SUMS would list too few
    for name in sorted({entry.name for entry in folder.iterdir() if entry.is_file()} - listed):
        raise UserError(f"{path}: does not list {name}; {_RESTORE}")
    return listed


def remove_folder(folder: Path) -> None:
    """Remove a folder if it exists. It is renamed first, so that never half of it is left; raises OSError."""
    doomed = folder.with_name(folder.name + ".removed")
    if doomed.exists():  # left by a killed process
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
