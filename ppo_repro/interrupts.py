"""Ctrl-C and SIGTERM as exceptions in the main thread, never at a moment when the exception would be lost.

While Numba compiles or loads code, LLVM calls back into Python through ctypes, which prints an exception and drops it:
the run would continue, or fail with a compiler error. A signal that arrives then is sent again a moment later.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ppo_repro.errors import Terminated

AGAIN_SECONDS = 0.05


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


def _interrupt(number: int, frame: object) -> None:
    if is_compiling():
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
