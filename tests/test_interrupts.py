"""A signal in an import, in Pydantic, or as a lock is taken: raised after it. The default handler breaks them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ppo_repro import interrupts
from ppo_repro.errors import Terminated
from tests.support.interrupts import hearing_ctrl_c
from tests.support.paths import ROOT

# the signal comes while torch imports NumPy
IN_AN_IMPORT = """
import signal, sys, time

sent = []

def at_numpy(event, arguments):
    if event == "import" and arguments[0] == "numpy._core.multiarray" and not sent:
        sent.append(True)
        signal.raise_signal(signal.SIGINT)

sys.addaudithook(at_numpy)
if sys.argv[1] == "installed":
    from ppo_repro import interrupts
    interrupts.install()
try:
    import ppo_repro.ranks
    import ppo_repro.numerics.library
    time.sleep(5)
    print("not interrupted", len(sent))
except KeyboardInterrupt:
    print("interrupted", "ppo_repro.ranks" in sys.modules)
"""


def ran(handler: str, folder: Path) -> tuple[str, str]:
    command = [sys.executable, "-c", IN_AN_IMPORT, handler]
    with hearing_ctrl_c():
        found = subprocess.run(
            command, env={"PYTHONPATH": str(ROOT)}, cwd=folder, capture_output=True, text=True, timeout=120, check=False
        )
    return found.stdout, found.stderr


@pytest.mark.slow
def test_an_interrupt_in_an_import_of_ours_is_raised_after_it(tmp_path: Path) -> None:
    assert ran("installed", tmp_path) == ("interrupted True\n", "")
    assert ran("default", tmp_path)[0] == "not interrupted 1\n"


@pytest.fixture
def installed() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts.install()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_signal_is_raised_at_once(number: int, expected: type[BaseException]) -> None:
    with pytest.raises(expected) as at_once:
        signal.raise_signal(number)
    assert at_once.type is expected


def signal_at_event(event_number: int, action: Callable[[], None]) -> tuple[BaseException | None, bool]:
    """What `action` raises when SIGINT comes at the n-th line it executes of threading.py, and whether it came."""
    events = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal events
        if frame.f_code.co_filename != threading.__file__:
            return None
        if event == "line":
            events += 1
            if events == event_number:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except BaseException as error:
        return error, events >= event_number
    finally:
        sys.settrace(before)
    return None, events >= event_number


def every_event() -> list[tuple[BaseException | None, bool]]:
    """For SIGINT at each line of a wait: what was raised, and whether the lock is free afterwards."""
    outcomes = []
    for event_number in range(1, 1000):
        condition = threading.Condition(threading.Lock())

        def wait_with(condition: threading.Condition = condition) -> None:
            with condition:
                condition.wait(0.1)
            time.sleep(0.1)

        error, is_reached = signal_at_event(event_number, wait_with)
        if not is_reached:
            return outcomes
        outcomes.append((error, condition.acquire(blocking=False)))
    raise AssertionError("a wait has fewer lines")


@pytest.mark.usefixtures("installed")
def test_a_signal_anywhere_in_a_wait_leaves_its_lock_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "AGAIN_SECONDS", 0.01)
    outcomes = every_event()
    assert len(outcomes) >= 10
    assert all(type(error) is KeyboardInterrupt and is_free for error, is_free in outcomes), outcomes
    with hearing_ctrl_c():  # the control: the default handler breaks locks
        outcomes = every_event()
    assert any(isinstance(error, RuntimeError) for error, _ in outcomes)
    assert any(not is_free for _, is_free in outcomes)


def test_a_process_that_is_to_ignore_ctrl_c_ignores_it() -> None:
    before = signal.getsignal(signal.SIGTERM)
    own = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for what it starts in the background
    try:
        interrupts.install()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, own)
        signal.signal(signal.SIGTERM, before)
