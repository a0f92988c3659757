"""Run a peer in a process of its own. It receives `step THREADS` and answers with the step's wall and CPU seconds."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from experiments.benchmarks.timing import Cost


class Peer:
    """Running peer. `step` raises RuntimeError, with the end of the log, if the peer has ended."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def step(self, threads: int) -> Cost:
        """Run one step on `threads` threads, and return its cost."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"step {threads}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the peer's process ended: " + self._log.read_text(errors="replace")[-2000:])
        return Cost(**json.loads(line))


@contextmanager
def started(command: Sequence[str], log: Path) -> Iterator[Peer]:
    """Yield a peer while the block runs. The peer ends when its standard input closes."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            yield Peer(process, log)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)
