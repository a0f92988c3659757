"""Processes that run or resume, and are killed after some time or at a chosen change of a file."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("processes") / "writes.c"


@dataclass
class Worker:
    """`kill_worker` with its imports done; what it forks lives for a second or less."""

    process: subprocess.Popen[str]

    def say(self, *words: str | Path) -> None:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def killed(self, after: float | str, *command: str | Path) -> bool:
        """Fork a child for the command and kill it after so many seconds, or `at:N`; whether it was still alive."""
        self.say(str(after), *command)
        code = int(self.hear())
        assert code in (0, -signal.SIGKILL), f"{command} ended with {code}"
        return code != 0

    def changes(self, *command: str | Path) -> int:
        """How many changes of files the whole command makes."""
        self.say("count", *command)
        count = int(self.hear())
        assert self.hear() == "0"
        return count


@contextmanager
def working(first: str, library: Path | None = None) -> Iterator[Worker]:
    """A worker that has executed the command `first`; `library` counts its changes."""
    command = [sys.executable, "-m", "tests.support.processes.kill_worker", first]
    preloaded = {} if library is None else {"LD_PRELOAD": str(library)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **preloaded}
    ) as process:
        made = Worker(process)
        assert made.hear() == "ready"
        yield made
        assert process.stdin is not None
        process.stdin.close()


def counting_library(folder: Path) -> Path:
    """`writes.c` compiled into `folder`; skips the test where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler to end a process at a chosen change of a file")
    library = folder / "writes.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library
