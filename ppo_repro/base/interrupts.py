"""Ctrl-C and SIGTERM as exceptions in the main thread.

An import of torch or Pydantic may replace the exception with another one or drop it. `was_heard` tells whether a
signal came, so that the command line reports the other exception as an interrupt.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

from ppo_repro.base.errors import Terminated

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_heard: list[int] = []
_asked: list[KeyboardInterrupt] = []
_ending: list[bool] = []


def install() -> None:
    """Raise Terminated on SIGTERM, and KeyboardInterrupt on SIGINT unless this process was started ignoring it.

    Raises the exception at once if a signal was `held` for this process.
    """
    for state in (_heard, _asked, _ending):
        state.clear()
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def stop_main(error: KeyboardInterrupt) -> None:
    """Raise `error` in the main thread, even in a wait, unless that ends already; for other threads."""
    _asked.append(error)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def ends_with_parent() -> Callable[[], object]:
    """Return a function that lets the system kill the process that calls it when its parent ends; Linux alone can."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: None
    return partial(prctl, 1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def ending() -> None:
    """Raise no signal from here on: this process ends already, and writes why."""
    _ending.append(True)


def leave_alone() -> None:
    """Let a signal end this process at once from now on, because the command has nothing more to print."""
    for number in _SIGNALS:
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def held() -> Iterator[None]:
    """Block signals: in this thread until the block ends, in processes started inside it until they call `install`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def was_heard() -> KeyboardInterrupt | None:
    """Return the interrupt that a signal asked for; None if no signal came."""
    if _asked:
        return _asked[0]
    if not _heard:
        return None
    return Terminated() if signal.SIGTERM in _heard else KeyboardInterrupt()


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _ending:
        return
    if _asked:
        ending()  # launchers end all processes when one is lost
        raise _asked[0]
    _heard.append(number)
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
