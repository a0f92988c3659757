"""A signal while machine code is made or returns, or a lock is taken: raised once that is done.

The default handler loses it in a callback of the compiler, makes another error of it, and leaves locks taken or given
back twice.
"""

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

import numpy as np
import pytest
from numba.core.compiler_lock import global_compiler_lock
from pydantic_core import PydanticSerializationError

from ppo_repro import interrupts
from ppo_repro.config.files import load_config
from ppo_repro.errors import Terminated
from ppo_repro.numerics.kernels.attention.block import cut_spans
from tests.support.interrupts import hearing_ctrl_c
from tests.support.paths import ROOT, TINY

# the signal comes inside of LLVM's callback into Python, in the middle of a kernel's compilation
IN_THE_CALLBACK = """
import signal, sys, time
from numba.core.codegen import CPUCodeLibrary

real, sent = CPUCodeLibrary._object_compiled_hook, []

def compiled(ll_module, buffer):
    if not sent:
        sent.append(True)
        signal.raise_signal(signal.SIGINT)
    real(ll_module, buffer)

CPUCodeLibrary._object_compiled_hook = compiled
from ppo_repro import interrupts
from ppo_repro.numerics.kernels.core.compile import kernel

if sys.argv[1] == "installed":
    interrupts.install()

@kernel
def add(a, b):
    return a + b

try:
    print("sum", add(1, 2))
    time.sleep(5)
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted", len(sent))
"""


# the signal comes while torch imports NumPy, or what Numba needs for the module of its lock
IN_AN_IMPORT = """
import signal, sys, time

sent = []

def at_numpy(event, arguments):
    if event == "import" and arguments[0] == sys.argv[2] and not sent:
        sent.append(True)
        signal.raise_signal(signal.SIGINT)

sys.addaudithook(at_numpy)
if sys.argv[1] == "installed":
    from ppo_repro import interrupts
    interrupts.install()
try:
    import ppo_repro.ranks
    import ppo_repro.numerics.backend
    time.sleep(5)
    print("not interrupted", len(sent))
except KeyboardInterrupt:
    print("interrupted", "ppo_repro.ranks" in sys.modules)
"""


def ran(script: str, handler: str, folder: Path, *rest: str) -> tuple[str, str]:
    (folder / "script.py").write_text(script)
    command = [sys.executable, str(folder / "script.py"), handler, *rest]
    environment = {"PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(folder / "cache")}
    with hearing_ctrl_c():
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return found.stdout, found.stderr


@pytest.mark.slow
def test_an_interrupt_in_a_callback_of_the_compiler_is_raised_after_it(tmp_path: Path) -> None:
    out, err = ran(IN_THE_CALLBACK, "installed", tmp_path)
    assert out.splitlines() == ["sum 3", "interrupted 1"] and err == ""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["numpy._core.multiarray", "numba.core.event"])
def test_an_interrupt_in_an_import_of_ours_is_raised_after_it(module: str, tmp_path: Path) -> None:
    assert ran(IN_AN_IMPORT, "installed", tmp_path, module) == ("interrupted True\n", "")


@pytest.mark.slow
def test_the_default_handler_loses_them(tmp_path: Path) -> None:
    out, err = ran(IN_THE_CALLBACK, "default", tmp_path)
    assert "interrupted 1" not in out and "Exception ignored on calling ctypes callback" in err
    assert ran(IN_AN_IMPORT, "default", tmp_path, "numpy._core.multiarray")[0] == "not interrupted 1\n"


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
def test_a_signal_waits_for_the_compiler_only(number: int, expected: type[BaseException]) -> None:
    with pytest.raises(expected) as at_once:
        signal.raise_signal(number)
    assert at_once.type is expected
    with global_compiler_lock:
        signal.raise_signal(number)
        time.sleep(4 * interrupts.AGAIN_SECONDS)  # sent again and again
    with pytest.raises(expected):
        time.sleep(60)


def signal_in_call(name: str, action: Callable[[], object]) -> tuple[BaseException | None, bool]:
    """What `action` raises when SIGINT comes at the first call of a function of that name, and whether it came."""
    came = False

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal came
        if frame.f_code.co_name == name and not came:
            came = True
            signal.raise_signal(signal.SIGINT)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except BaseException as error:
        return error, came
    finally:
        sys.settrace(before)
    return None, came


def result_of_machine_code() -> object:
    return cut_spans(np.zeros((1, 1), np.int64), np.ones((1, 1), np.int64), 8)


def digest_of_a_config() -> object:
    return load_config(TINY).digest()


# where other code calls Python and makes an error of its own of any exception
CALLED = pytest.mark.parametrize(
    ("name", "action", "broken"),
    [
        ("_numba_unpickle", result_of_machine_code, SystemError),
        ("_without_absent", digest_of_a_config, PydanticSerializationError),
    ],
)


@pytest.mark.usefixtures("installed")
@CALLED
def test_a_signal_waits_for_those_who_would_make_another_error_of_it(
    name: str, action: Callable[[], object], broken: type[Exception]
) -> None:
    finished = []

    def with_time_for_the_next() -> None:
        finished.append(action())
        time.sleep(60)

    error, came = signal_in_call(name, with_time_for_the_next)
    assert came and type(error) is KeyboardInterrupt and finished


@CALLED
def test_the_default_handler_lets_them(name: str, action: Callable[[], object], broken: type[Exception]) -> None:
    with hearing_ctrl_c():
        error, came = signal_in_call(name, action)
    assert came and type(error) is broken


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


def test_the_default_handler_breaks_locks() -> None:
    with hearing_ctrl_c():
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


def test_children_of_tests_hear_ctrl_c_whatever_their_parent_ignores() -> None:
    command = [sys.executable, "-c", "import signal; print(repr(signal.getsignal(signal.SIGINT)))"]

    def disposition() -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    own = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with hearing_ctrl_c():
            assert "default_int_handler" in disposition()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert "SIG_IGN" in disposition(), "the control: a child inherits what its parent ignores"
    finally:
        signal.signal(signal.SIGINT, own)
