"""A process that imports once and forks one cell after the other, and such a cell as the grid sees it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from ppo_repro.grids.cell import LOG, Order, cell_environment, command_of, forget_result

KILLED = -signal.SIGKILL


class Worker:
    """Runs one cell at a time. It and its cell end with this process, however that ends."""

    def __init__(self, threads: int, log: Path) -> None:
        self._threads = threads
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ppo_repro.commands.grid_cells", "forked"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=cell_environment(threads),
                start_new_session=True,
                bufsize=0,
            )

    def suits(self, threads: int) -> bool:
        """Whether it can run a cell of so many threads: it lives, and its libraries were loaded for them."""
        return self._process.poll() is None and self._threads == threads

    def write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the next answer is that it has ended
            self._process.stdin.write(line)

    def answer(self, seconds: float) -> int | None:
        """The next number that it writes; None if it does not within `seconds`. EOFError where it has ended."""
        assert self._process.stdout is not None
        stdout = self._process.stdout.fileno()
        if not select.select([stdout], [], [], seconds)[0]:
            return None
        line = b""
        while not line.endswith(b"\n"):  # written as one
            byte = os.read(stdout, 1)
            if not byte:
                raise EOFError
            line += byte
        return int(line)

    def end(self) -> int:
        """Wait until it has ended by itself; its exit code."""
        return self._process.wait()

    def close(self) -> None:
        """End it, and the cell if one runs."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.kill()
        self._process.wait()


class ForkedCell:
    """A running cell; the methods are those of `subprocess.Popen`."""

    def __init__(self, worker: Worker, order: Order) -> None:
        forget_result(order)
        self.worker = worker
        self._pid: int | None = None
        self._code: int | None = None
        worker.write(json.dumps([str(Path(order.folder) / LOG), command_of(order)]).encode() + b"\n")

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self._look(0.0)

    def wait(self, timeout: float) -> int:
        """The exit code; TimeoutExpired where it does not end."""
        deadline = time.monotonic() + timeout
        while (code := self._look(max(0.0, deadline - time.monotonic()))) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("cell", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the cell's process; where there is none yet, there will be none."""
        if self.poll() is None:
            if self._pid is None:
                self.worker.close()
                self._code = KILLED
            else:
                os.kill(self._pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def _look(self, seconds: float) -> int | None:
        if self._code is not None:
            return self._code
        try:
            number = self.worker.answer(seconds)
        except EOFError:
            if self._pid is None:  # not even its imports worked
                self._code = self.worker.end() or 1
            else:  # what it forked has nobody left to tell of it
                with suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
                self._code = KILLED
            return self._code
        if number is None:
            return None
        if self._pid is None:
            self._pid = number
        else:
            self._code = number
        return self._code
