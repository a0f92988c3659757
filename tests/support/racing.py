"""Commands that begin at one moment, each in a process of its own, some killed on the way.

As a program it imports everything, then reads one JSON object a line, {"commands": [[DELAY, KILLED_AFTER or null,
ARGUMENT, ...], ...], "log": PATH}: it forks a child for each command, lets all of them go at once, and prints the list
of their [process id, exit code, last error line]. The cells of a grid are forks too: importing everything would take
most of the time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from ppo_repro.commands.cli import exit_code_of
from ppo_repro.grids import cell


@dataclass(frozen=True)
class Contender:
    """A command line: begins so many seconds after the others, and is killed after so many more unless it is None."""

    arguments: Sequence[str | Path]
    delay: float = 0.0
    killed_after: float | None = None


@dataclass(frozen=True)
class Ended:
    """How a contender ended; `error` is its last line on stderr."""

    process: int
    code: int
    error: str


@dataclass
class Racetrack:
    """The program with its imports done."""

    process: subprocess.Popen[str]
    log: Path

    def race(self, *contenders: Contender) -> list[Ended]:
        commands = [[c.delay, c.killed_after, *map(str, c.arguments)] for c in contenders]
        print(json.dumps({"commands": commands, "log": str(self.log)}), file=self.process.stdin, flush=True)
        assert self.process.stdout is not None
        return [Ended(*ended) for ended in json.loads(self.process.stdout.readline())]


@contextlib.contextmanager
def racing(log: Path, *warm_up: str | Path) -> Iterator[Racetrack]:
    """A racetrack whose processes have imported what the command `warm_up` imports; they write to files `log`.N."""
    command = [sys.executable, "-m", "tests.support.racing", *map(str, warm_up)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        yield Racetrack(process, log)
        process.stdin.close()


class _ForkedCell:
    """What a cell needs of subprocess.Popen, by a fork of this process, whose imports are done."""

    def __init__(self, command: Sequence[str], stdout: IO[bytes], **_: Any) -> None:
        reading, self._stdin = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for source, target in ((reading, 0), (stdout.fileno(), 1), (stdout.fileno(), 2)):
                os.dup2(source, target)
            os.closerange(3, 100)
            os._exit(exit_code_of(command[3:]))  # after "python -m MODULE"
        os.close(reading)

    def __class_getitem__(cls, _: object) -> type[_ForkedCell]:
        return cls

    def __enter__(self) -> _ForkedCell:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._stdin)

    def poll(self) -> int | None:
        return self.returncode if self.returncode is not None else self._look(os.WNOHANG)

    def wait(self) -> int | None:
        return self.returncode if self.returncode is not None else self._look(0)

    def _look(self, options: int) -> int | None:
        process, status = os.waitpid(self.pid, options)
        self.returncode = os.waitstatus_to_exitcode(status) if process else None
        return self.returncode


def _child(start: int, delay: float, arguments: Sequence[str], log: Path) -> int:
    """Wait until the other end of the pipe `start` closes, then run the program; its exit code."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.read(start, 1)
    time.sleep(delay)
    cell.subprocess = SimpleNamespace(Popen=_ForkedCell, PIPE=subprocess.PIPE)  # type: ignore[assignment]
    try:
        return exit_code_of(arguments)
    except BaseException:
        traceback.print_exc()
        return 99


def _fork(reading: int, writing: int, delay: float, arguments: Sequence[str], log: Path) -> int:
    child = os.fork()
    if child == 0:
        code = 98
        with contextlib.suppress(BaseException):
            os.close(writing)
            code = _child(reading, delay, arguments, log)
            sys.stderr.flush()
        os._exit(code)
    return child


def _race(commands: Sequence[list[object]], log: str) -> list[list[object]]:
    reading, writing = os.pipe()
    children, killers = [], []
    for number, (delay, killed_after, *arguments) in enumerate(commands):
        path = Path(f"{log}.{number}")
        child = _fork(reading, writing, float(str(delay)), [str(a) for a in arguments], path)
        children.append((child, path))
        if killed_after is not None:  # not reaped before the killers are done, so the number is still this child's
            after = float(str(delay)) + float(str(killed_after))
            killers.append(threading.Timer(after, os.kill, (child, signal.SIGKILL)))
    os.close(reading)
    os.close(writing)
    for killer in killers:
        killer.start()
    for killer in killers:
        killer.join()
    ended: list[list[object]] = []
    for child, path in children:
        _, status = os.waitpid(child, 0)
        lines = path.read_text(errors="replace").splitlines()
        ended.append([child, os.waitstatus_to_exitcode(status), lines[-1] if lines else ""])
    return ended


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        if sys.argv[1:]:
            assert exit_code_of(sys.argv[1:]) == 0
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_race(**json.loads(line))), flush=True)
