"""The lock of a folder that only one process at a time may write: a run or a grid.

The lock is an advisory one (flock, through filelock) on the file NAME.lock beside the folder NAME. Only its holder may
make, change, rename or remove NAME, NAME.tmp and NAME.removed, so a folder that exists when a process gets the lock was
left by a dead process. The kernel releases the lock when the holder ends, however it ends. The file names the holder.
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
from typing import TYPE_CHECKING

from ppo_repro.base.clock import as_text, moment
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import make_folder
from ppo_repro.base.output import masked, printable

if TYPE_CHECKING:
    from filelock import AcquireReturnProxy, UnixFileLock

SUFFIX = ".lock"
# A lock that names no living process of this machine counts as held only after this time. A reader that looks for a
# holder has the lock for an instant, and a new holder needs an instant to write its name.
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
    with _acquired(folder, path):
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()  # before the release, so that nobody else's file is unlinked


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
    path, deadline = _lock_of(folder), time.monotonic() + PATIENCE_SECONDS
    while has_writer(folder):
        if _lives(_said(path)) or time.monotonic() > deadline:
            raise _refusal(folder, path)
        time.sleep(LOOK_SECONDS)


def locked_in(folder: Path) -> Iterator[Path]:
    """Yield the folders two levels below `folder` that a process is writing, even if they do not exist yet."""
    for path in folder.glob(f"*/*{SUFFIX}"):
        if has_writer(target := path.with_name(path.name.removesuffix(SUFFIX))):
            yield target


def _lock_of(folder: Path) -> Path:
    """Return the path of the lock file. Every path to the folder gives the same one."""
    real = Path(os.path.realpath(folder))
    return real.with_name(real.name + SUFFIX)


def _acquired(folder: Path, path: Path) -> AcquireReturnProxy[UnixFileLock]:
    """Take the lock and write this process into its file as the holder. The end of the context releases it."""
    from filelock import Timeout, UnixFileLock  # slower to import than all that readers need

    def sign(descriptor: int) -> None:
        # on NFS a file has a name after it is unlinked, so filelock takes it for the file of the path
        if not path.exists() or not os.path.samestat(os.fstat(descriptor), os.stat(path)):
            raise Timeout(str(path))
        if not _is_ours(os.pread(descriptor, 1000, 0)):
            raise UserError(f"{path}: is no lock of ppo-repro, and {folder} needs this name for its lock; move it away")
        who = f"process {os.getpid()} on {socket.gethostname()} since {as_text(moment())} by {_command()}\n"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, who.encode(), 0)

    lock = UnixFileLock(path, thread_local=False, fallback_to_soft=False, on_acquired=sign)
    try:
        return lock.acquire(PATIENCE_SECONDS, LOOK_SECONDS, cancel_check=lambda: _lives(_said(path)))
    except Timeout:
        raise _refusal(folder, path) from None
    except OSError as error:
        raise UserError(
            f"{path}: cannot be locked ({error.strerror}); keep runs where you may write, on a file system with flock"
        ) from error


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
    """Return whether a file may be the lock of an earlier process. A power cut can leave zeros."""
    return not content.strip(b"\0") or _HOLDER.fullmatch(content) is not None


def _lives(content: bytes) -> bool:
    """Return whether the process that a lock file names lives on this machine."""
    holder = _HOLDER.fullmatch(content)
    if holder is None or holder[2].decode() != socket.gethostname():
        return False
    try:
        os.kill(int(holder[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _refusal(folder: Path, path: Path) -> UserError:
    """Return the error that names the holder of a folder's lock, if its file names one."""
    who, holder = "", _HOLDER.fullmatch(_said(path))
    if holder is not None:
        process, machine, since, command = (part.decode() for part in holder.groups())
        who = f" (process {process} on {machine}, since {since}: {command})"
    return UserError(f"{folder}: another process is writing it{who}; wait until that process ends, or end it first")
