"""The lock of a folder that only one process at a time may write: a run or a grid.

The lock is an advisory one (flock) on the file NAME.lock beside the folder NAME. Only its holder may make, change,
rename or remove NAME, NAME.tmp and NAME.removed, so a folder that exists when a process gets the lock was left by a
dead process. The kernel releases the lock when the holder ends, however it ends. The file names the holder.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ppo_repro.base.clock import as_text, moment
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import make_folder
from ppo_repro.base.output import masked, printable

SUFFIX = ".lock"
# how long a lock that names no living process of this machine must be held before it counts as held: a reader that
# looks whether there is a holder has it for an instant, and a new holder needs an instant to say who it is
PATIENCE_SECONDS = 5.0
LOOK_SECONDS = 0.01
_HOLDER = re.compile(rb"process (\d+) on (\S+) since (\S+) by ([^\n]*)\n")
COMMAND_CHARACTERS = 200  # of the holder's command line that are told


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which need not exist yet. Raises UserError, naming the holder, if another process has
    it.

    Readers need no lock.
    """
    path = _lock_of(folder)
    if folder.is_mount():
        raise UserError(f"{folder}: is a mount point, so its lock would not be seen elsewhere; mount {path.parent}")
    try:
        make_folder(path.parent)
    except FileExistsError as error:
        raise UserError(f"{folder}: the file {error.filename} is in the way; choose another --out") from error
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); choose another --out") from error
    descriptor = _acquire(folder, path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)  # last, so that nobody else's file is unlinked


def has_writer(folder: Path) -> bool:
    """Return whether a process is writing a folder; False if the lock cannot be read.

    Processes of other machines count if the file system shares flock, as NFS does.
    """
    try:
        descriptor = os.open(_lock_of(folder), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def require_no_writer(folder: Path) -> None:
    """Raise UserError, naming the process, if a process is writing a folder."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while has_writer(folder):
        _refuse_or_wait(folder, deadline)


def locked_in(folder: Path) -> Iterator[Path]:
    """Yield the folders two levels below `folder` that a process is writing, even if they do not exist yet."""
    for path in folder.glob(f"*/*{SUFFIX}"):
        if has_writer(target := path.with_name(path.name.removesuffix(SUFFIX))):
            yield target


def _lock_of(folder: Path) -> Path:
    """Return the path of the lock file; every path to the folder gives the same one."""
    real = Path(os.path.realpath(folder))
    return real.with_name(real.name + SUFFIX)


def _acquire(folder: Path, path: Path) -> int:
    """Take the lock, write this process into the lock file as the holder, and return the file's descriptor."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while (descriptor := _try(path)) is None:
            _refuse_or_wait(folder, deadline)
        if not _is_ours(os.pread(descriptor, 1000, 0)):
            os.close(descriptor)
            raise UserError(f"{path}: is no lock of ppo-repro, and {folder} needs this name for its lock; move it away")
        os.ftruncate(descriptor, 0)
        who = f"process {os.getpid()} on {socket.gethostname()} since {as_text(moment())} by {_command()}\n"
        os.pwrite(descriptor, who.encode(), 0)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be locked ({error.strerror}); keep runs where you may write, on a file system with flock"
        ) from error
    return descriptor


def _try(path: Path) -> int | None:
    """Try to take the lock; return the descriptor of its file, or None if another process has it. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # the holder before may have unlinked this file, and another process locked the next one
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _command() -> str:
    """Return the command line of this process on one short line, without secrets."""
    program, *arguments = sys.argv or [""]
    name = Path(program).name.replace("__main__.py", "ppo-repro")  # of `python -m ppo_repro`
    return printable(masked(shlex.join([name, *arguments])))[:COMMAND_CHARACTERS]


def _said(path: Path) -> bytes:
    """Return the content of the lock file; empty if the file is gone."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _is_ours(content: bytes) -> bool:
    """Return whether a file may be the lock of an earlier process; a power cut can leave zeros."""
    return not content.strip(b"\0") or _HOLDER.fullmatch(content) is not None


def _lives(said: bytes) -> bool:
    """Return whether the process that a lock file names lives on this machine."""
    found = _HOLDER.fullmatch(said)
    if found is None or found[2].decode() != socket.gethostname():
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _refuse_or_wait(folder: Path, deadline: float) -> None:
    """Raise UserError once the holder of a folder's lock can be named, or the deadline is over; otherwise wait."""
    said = _said(_lock_of(folder))
    if not _lives(said) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        return
    holder = _HOLDER.fullmatch(said)
    who = ""
    if holder is not None:
        process, machine, since, command = (part.decode() for part in holder.groups())
        who = f" (process {process} on {machine}, since {since}: {command})"
    raise UserError(f"{folder}: another process is writing it{who}; wait until that process ends, or end it first")
