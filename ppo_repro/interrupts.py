"""Ctrl-C and SIGTERM as exceptions in the main thread, never at a moment when the exception would be lost or do harm.

While Numba compiles or loads code, LLVM calls back into Python through ctypes, which prints an exception and drops it:
the run would continue, or fail with a compiler error. In the midst of taking or giving back a lock of the standard
library an exception leaves the lock taken (another thread waits for ever) or given back twice (RuntimeError). A signal
that arrives at such a moment is sent again a moment later.
"""

from __future__ import annotations

import concurrent.futures
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ppo_repro.errors import Terminated

AGAIN_SECONDS = 0.05
# written in Python, with locks that no exception may meet half taken
_WITH_LOCKS = (threading.__file__, queue.__file__, str(Path(concurrent.futures.__file__).parent))

# the instruction at which the last signal found the thread inside of such code
_stood_at: tuple[int, int] | None = None


def install() -> None:
    """Raise Terminated on SIGTERM, and KeyboardInterrupt on SIGINT unless this process was started ignoring it."""
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


@contextmanager
def heard() -> Iterator[None]:
    """KeyboardInterrupt on SIGINT as `install` has it, in this block only, for a program that is not ours.

    Outside the main thread, and where the program has a handler of its own, nothing changes.
    """
    own = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or own is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, own)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if is_compiling() or _is_moving_through_locks(frame):
        again = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()
    elif number == signal.SIGTERM:
        raise Terminated
    else:
        raise KeyboardInterrupt


def is_compiling() -> bool:
    """Whether this thread holds the lock of Numba's compiler. Numba is not imported here: most commands do without."""
    module = sys.modules.get("numba.core.compiler_lock")
    return module is not None and bool(module.global_compiler_lock.is_locked())


def _is_moving_through_locks(frame: FrameType | None) -> bool:
    """Whether the thread runs code with locks, and does not stand where the signal before this one found it.

    A thread that stands still waits for something, and waiting is written so that an exception may end it.
    """
    global _stood_at
    before, _stood_at = _stood_at, None
    while frame is not None and not frame.f_code.co_filename.startswith(_WITH_LOCKS):
        frame = frame.f_back
    if frame is None:
        return False
    _stood_at = (id(frame), frame.f_lasti)
    return _stood_at != before
