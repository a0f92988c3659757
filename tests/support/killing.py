"""Processes that run or resume, and are killed after some time.

As a program it imports everything, then forks a child for each line `SECONDS run CONFIG OUT`, `SECONDS resume RUN` or
`SECONDS fork RUN OUT FIELD=VALUE`, kills it after so many seconds (inf: never), and prints its exit code.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ppo_repro.base.errors import UserError
from ppo_repro.config.files import load_config
from tests.support.language import fork, resume, run


@dataclass
class Worker:
    """The program with its imports done; what it forks lives for a second or less."""

    process: subprocess.Popen[str]

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def killed(self, after: float, *command: str | Path) -> bool:
        """Fork a child for the command and kill it after so many seconds; whether it was still alive."""
        print(after, *command, file=self.process.stdin, flush=True)
        code = int(self.hear())
        assert code in (0, -signal.SIGKILL), f"{command} ended with {code}"
        return code != 0


@contextlib.contextmanager
def working(first: str) -> Iterator[Worker]:
    """A worker that has executed the command `first`."""
    command = [sys.executable, "-m", "tests.support.killing", first]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        made = Worker(process)
        assert made.hear() == "ready"
        yield made
        assert process.stdin is not None
        process.stdin.close()


def work(line: str) -> int:
    """The exit code of one command."""
    command, *arguments = line.split()
    try:
        if command == "run":
            run(load_config(Path(arguments[0])), Path(arguments[1]))
        elif command == "fork":
            fork(Path(arguments[0]), Path(arguments[1]), None, *arguments[2:])
        else:
            resume(Path(arguments[0]))
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        return 2
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    work(sys.argv[1])  # so that everything is imported
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, command = line.split(maxsplit=1)
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                os._exit(work(command))
            os._exit(1)
        if math.isfinite(float(seconds)):
            time.sleep(float(seconds))
            os.kill(child, signal.SIGKILL)  # not reaped yet, so the number is still this child's
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
