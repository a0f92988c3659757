"""Ctrl-C and SIGTERM as exceptions in the main thread.

An import of torch or Pydantic may replace the exception with another one or drop it. `was_heard` tells whether a
signal came, so that the command line reports the other exception as an interrupt.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ppo_repro.base.errors import Terminated

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_heard: list[int] = []


def install() -> None:
    """Raise Terminated on SIGTERM, and KeyboardInterrupt on SIGINT unless this process was started ignoring it.

    Raises one of them at once if a signal was `held` for this process.
    """
    _heard.clear()
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


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
    if not _heard:
        return None
    return Terminated() if signal.SIGTERM in _heard else KeyboardInterrupt()


def _interrupt(number: int, frame: FrameType | None) -> None:
    _heard.append(number)
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
