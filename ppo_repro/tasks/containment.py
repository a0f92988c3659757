"""The user's code inside our process: what it changes is put back, and only Ctrl-C, SIGTERM, a time limit end it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

from ppo_repro.errors import UserError
from ppo_repro.tasks import process_state
from ppo_repro.tasks.process_state import ProcessState

T = TypeVar("T")

_AGAIN_SECONDS = 1.0  # between two attempts to end a call that catches what ends it


class TookTooLong(Exception):
    """A call was ended by its time limit; the message says which."""


@dataclass(frozen=True)
class Contained:
    """The inside of `contained`."""

    interruptions: list[BaseException]  # what Ctrl-C or SIGTERM has raised in here

    def call(
        self, compute: Callable[[], T], describe: Callable[[BaseException], str], seconds: float | None = None
    ) -> T:
        """compute(); UserError(describe(error)) for whatever it raises, SystemExit and KeyboardInterrupt included.

        A Ctrl-C or SIGTERM of the user is raised again, also where `compute` caught it and went on. A call that takes
        longer than `seconds` of wall time is ended by a TookTooLong, also where it catches that.
        """
        late: list[TookTooLong] = []
        try:
            with _ended_after(seconds, late):
                value = compute()
        except BaseException as error:
            self._interrupted()
            raise UserError(describe(late[0] if late else error)) from error
        self._interrupted()
        if late:
            raise UserError(describe(late[0])) from late[0]
        return value

    def _interrupted(self) -> None:
        if self.interruptions:
            raise self.interruptions[0]


@contextmanager
def contained(state: ProcessState | None = None) -> Iterator[Contained]:
    """Begin in `state`, and put the state of the process back at the end; what is printed to stdout goes to stderr."""
    before, alarm = process_state.read(), signal.getitimer(signal.ITIMER_REAL)
    try:
        with warnings.catch_warnings(), _stdout_to_stderr(), _noting_interruptions() as interruptions:
            if state is not None:
                process_state.write(state)
            yield Contained(interruptions)
    finally:
        if not any(alarm):
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm left behind would end the process
        process_state.write(before)


@contextmanager
def _ended_after(seconds: float | None, late: list[TookTooLong]) -> Iterator[None]:
    """Raise a TookTooLong in the block, and note it in `late`, after so many seconds; None: never.

    It comes by a signal, which only the main thread handles: a block in another thread has no limit. SIGVTALRM, because
    the user's code and test runners may have an alarm of their own.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    main, done = threading.main_thread().ident, threading.Event()
    assert main is not None

    def end(number: int, frame: FrameType | None) -> None:
        late.append(TookTooLong(f"no answer within {seconds:g} s"))
        raise late[-1]

    def watch() -> None:
        wait = seconds
        while not done.wait(wait):
            signal.pthread_kill(main, signal.SIGVTALRM)
            wait = _AGAIN_SECONDS

    before = signal.signal(signal.SIGVTALRM, end)
    watcher = threading.Thread(target=watch, name="time limit", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()  # no signal is sent after this
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Also for programs that are started here, and for a stdout that somebody kept."""
    _flush()
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # one of them is closed
        kept = None
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _flush()
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)


def _flush() -> None:
    for stream in (sys.stdout, sys.__stdout__, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


@contextmanager
def _noting_interruptions() -> Iterator[list[BaseException]]:
    """Keep what the handlers of Ctrl-C and SIGTERM raise: the code under them may catch it, or raise the same."""
    raised: list[BaseException] = []
    if threading.current_thread() is not threading.main_thread():
        yield raised  # signals are handled in the main thread
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        handler = handlers[signal.Signals(number)]
        assert callable(handler)
        try:
            handler(number, frame)
        except BaseException as interruption:
            raised.append(interruption)
            raise
        finally:
            # a handler may give its place to another one, as that of several processes does
            if signal.getsignal(number) is not note:
                handlers[signal.Signals(number)] = signal.getsignal(number)
                signal.signal(number, note)

    for number, handler in handlers.items():
        if callable(handler):
            signal.signal(number, note)
    try:
        yield raised
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
