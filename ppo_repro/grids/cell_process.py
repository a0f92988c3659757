"""The process of one cell, which runs `ppo-repro ARGUMENTS` and ends with the process that started it.

`python -m ppo_repro.grids.cell_process ARGUMENTS` starts from nothing; its stdin is a pipe to its parent. `forked` runs
in a process that has imported already what every run needs.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import select
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

# what a run imports when it gets there; a server imports them before it forks cells
IMPORTED = [
    "ppo_repro.commands.cli", "ppo_repro.commands.progress", "ppo_repro.runs.language", "ppo_repro.runs.run",
]  # fmt: skip


def forked(log: Path, arguments: Sequence[str]) -> None:
    """Run the command in this forked process, in a session of its own, with its output at the end of `log`."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    parent = multiprocessing.parent_process()
    assert parent is not None
    _run(parent.sentinel, arguments)


def _run(pipe: int, arguments: Sequence[str]) -> None:
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    sys.argv = ["ppo-repro", *arguments]
    runpy.run_module("ppo_repro", run_name="__main__")


def _end_with_parent(pipe: int) -> None:
    """The kernel closes the other end of the pipe when the parent ends."""
    closing = select.poll()
    closing.register(pipe, 0)
    closing.poll()
    os._exit(1)  # as a kill would: records are whole or absent at every instant


if __name__ == "__main__":
    _run(0, sys.argv[1:])
