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


def take(folder: Path, name: str) -> None:
    """Claim an entry, after the process that has it, if there is one: it may have written the entry by then.

    Does nothing where no file can be made or locked. A process that compiles a kernel waits only for those that it is
    made of, so that no two wait for each other. Raises UserError as `entries.read`.
    """
    path = folder / f"{name}{SUFFIX}"
    if path in _held:
        return
    with contextlib.suppress(OSError):
        entries.make_folder(folder)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            _lock(descriptor)
        except OSError:  # a file system without locks, or a process that takes too long
            os.close(descriptor)
        else:
            _held[path] = descriptor


def release(folder: Path, name: str) -> None:
    """Give a claim up, if there is one."""
    path = folder / f"{name}{SUFFIX}"
    descriptor = _held.pop(path, None)
    if descriptor is not None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked has the descriptor too
        os.close(descriptor)


def _leave_to_parent() -> None:
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _lock(descriptor: int) -> None:
    """Lock a file, after PATIENCE TimeoutError."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE)
        else:
            return
    raise TimeoutError
