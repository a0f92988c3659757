"""Writing one iteration while the next is computed: a thread that appends in order, one iteration at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from ppo_repro.records import writer
from ppo_repro.records.manifest import Head


class Appender:
    """Appends to one run. At most one iteration waits for the disk: memory is bounded, and a kill loses no more."""

    def __init__(self, run_dir: Path, current: Head, thread: ThreadPoolExecutor) -> None:
        self._run_dir, self._current, self._thread = run_dir, current, thread
        self._writing: Future[Head] | None = None

    def settle(self) -> Head:
        """Wait until everything is durable; the manifest as it is on disk. Raises what writing raised."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self._current = writing.result()
        return self._current

    def start(self, iteration: int, tables: Mapping[str, pa.Table]) -> None:
        """Begin to write an iteration after the one before; its tables must not change. Raises like `settle`."""
        current = self.settle()
        self._writing = self._thread.submit(writer.append_iteration, self._run_dir, current, iteration, tables)

    def leave(self) -> None:
        """Wait for what is being written, whether it fails or not."""
        if self._writing is not None:
            wait([self._writing])


@contextmanager
def appending(run_dir: Path, current: Head) -> Iterator[Appender]:
    """An appender whose thread ends with the block. Where an error ends the block, that error is raised."""
    with ThreadPoolExecutor(1, "records") as thread:
        appender = Appender(run_dir, current, thread)
        try:
            yield appender
        finally:
            appender.leave()
