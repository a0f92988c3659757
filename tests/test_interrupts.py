"""A signal while machine code is made: raised once that is done, where the default handler loses it in a callback."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from numba.core.compiler_lock import global_compiler_lock

from ppo_repro import interrupts
from ppo_repro.errors import Terminated
from tests.support.interrupts import hearing_ctrl_c
from tests.support.paths import ROOT

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


def in_the_callback(handler: str, folder: Path) -> tuple[str, str]:
    (folder / "script.py").write_text(IN_THE_CALLBACK)
    command = [sys.executable, str(folder / "script.py"), handler]
    environment = {"PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(folder / "cache")}
    with hearing_ctrl_c():
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return found.stdout, found.stderr


@pytest.mark.slow
def test_an_interrupt_in_a_callback_of_the_compiler_is_raised_after_it(tmp_path: Path) -> None:
    out, err = in_the_callback("installed", tmp_path)
    assert out.splitlines() == ["sum 3", "interrupted 1"] and err == ""


@pytest.mark.slow
def test_the_default_handler_loses_it(tmp_path: Path) -> None:
    out, err = in_the_callback("default", tmp_path)
    assert "interrupted 1" not in out and "Exception ignored on calling ctypes callback" in err


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
