"""Child processes that hear Ctrl-C whatever started the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.paths import ROOT


@contextmanager
def hearing_ctrl_c() -> Iterator[None]:
    """Processes started in this block have the default disposition of SIGINT.

    A shell without job control lets what it starts in the background ignore SIGINT, and children inherit that.
    """
    own = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, own)


def started(*arguments: str | Path) -> subprocess.Popen[str]:
    """The program, at work on one thread in a process that hears Ctrl-C."""
    command = [sys.executable, "-m", "ppo_repro", *map(str, arguments)]
    with hearing_ctrl_c():
        return subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
        )
