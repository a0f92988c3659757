"""Of the processes that want a kernel, one compiles it, and the others wait for its machine code.

A claim is a lock on a file beside the entry, which the system releases when a process ends, however it ends. It saves
time and decides nothing: without one, two processes compile the same machine code.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from ppo_repro.numerics.kernels.core import entries

SUFFIX = ".lock"
PATIENCE = 120.0  # seconds, in which any kernel is compiled; after them this process compiles it too
_PAUSE = 0.01
_held: dict[Path, int] = {}  # file descriptors of the claims of this process


def take(folder: Path, name: str) -> bool:
    """Claim an entry. Returns whether another process had it until now, and so may have written the entry.

    Does nothing where no file can be made or locked. A process that compiles a kernel waits only for those that it is
    made of, so that no two wait for each other. Raises UserError as `entries.read`.
    """
    path, waited = folder / f"{name}{SUFFIX}", False
    if path in _held:
        return False
    with contextlib.suppress(OSError):
        entries.make_folder(folder)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            waited = _lock(descriptor)
        except OSError:  # a file system without locks, or a process that takes too long
            os.close(descriptor)
        else:
            _held[path] = descriptor
    return waited


def release(folder: Path, name: str) -> None:
    """Give a claim up, if there is one."""
    path = folder / f"{name}{SUFFIX}"
    descriptor = _held.pop(path, None)
    if descriptor is not None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock a file. Returns whether another process had locked it. Raises TimeoutError after PATIENCE."""
    end, waited = time.monotonic() + PATIENCE, False
    while time.monotonic() < end:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            time.sleep(_PAUSE)
        else:
            return waited
    raise TimeoutError
