"""Ctrl-C and SIGTERM as exceptions in the main thread, never at a moment when the exception would be lost or do harm.

What Pydantic calls to write a config must not raise (PydanticSerializationError), nor the modules that torch imports
while it is imported (it drops the exception, and a later import fails). In the midst of taking or giving back a lock of
the standard library an exception leaves the lock taken (another thread waits for ever) or given back twice
(RuntimeError). A signal that arrives at such a moment is sent again a moment later. In a kernel it waits for its end.
"""

from __future__ import annotations

import concurrent.futures
import importlib
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

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_OURS = f"{Path(__file__).parent}{os.sep}"
_IMPORT = ("<frozen importlib._bootstrap>", importlib.__file__)

# the instruction at which the last signal found the thread inside of such code
_stood_at: tuple[int, int] | None = None


def install() -> None:
    """Raise Terminated on SIGTERM, and KeyboardInterrupt on SIGINT unless this process was started ignoring it.

    Raises one of them at once where a signal was `held` for this process.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def leave_alone() -> None:
    """From now on a signal ends this process at once, as it does where nobody listens: there is no more to say."""
    for number in _SIGNALS:
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def held() -> Iterator[None]:
    """Let signals wait: in this thread until the block ends, in a process that is started in it until `install`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
    if _is_importing(frame) or _is_passing_through(frame):
        again = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()
    elif number == signal.SIGTERM:
        raise Terminated
    else:
        raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    """Whether the thread runs an import of this package's, not one of the user's functions."""
    while (frame := _nearest(frame, _IMPORT)) is not None:
        frame = frame.f_back
        if frame is not None and frame.f_code.co_filename.startswith(_OURS):
            return True
    return False


def _is_passing_through(frame: FrameType | None) -> bool:
    """Whether the thread runs code with locks or Pydantic's, and is not where the signal before this one found it.

    A thread that stands still waits for something, and waiting is written so that an exception may end it.
    """
    global _stood_at
    before, _stood_at = _stood_at, None
    frame = _nearest(frame, _WITH_LOCKS + _folders("pydantic"))
    if frame is None:
        return False
    _stood_at = (id(frame), frame.f_lasti)
    return _stood_at != before


def _folders(package: str) -> tuple[str, ...]:
    """The folder of a package, none where it has not been imported."""
    module = sys.modules.get(package)
    return () if module is None else (f"{Path(str(module.__file__)).parent}{os.sep}",)


def _nearest(frame: FrameType | None, places: tuple[str, ...]) -> FrameType | None:
    """The innermost frame around `frame` whose file begins with one of `places`."""
    while frame is not None and not frame.f_code.co_filename.startswith(places):
        frame = frame.f_back
    return frame
