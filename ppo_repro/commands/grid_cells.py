"""The processes of a grid's cells on this machine: `python -m ppo_repro.commands.grid_cells one|forked`.

`one ARGUMENTS` is one cell; its arguments are those of `ppo-repro`. `forked` runs cells one after the other: it imports
what every run needs once, and forks a process for each. On stdin it reads a line of JSON per cell, `[LOG, ARGUMENTS]`;
on stdout it writes the id of the cell's process, and after its end the exit code, negative for a signal.

Each ends with the process that started it, however that one ends: its stdin is a pipe to that process, which the kernel
closes. What is committed by then stays; the rest is done at the next call.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import sys
import threading
from pathlib import Path

from ppo_repro import interrupts

# what a run imports when it gets there; without them every cell would
LATER = (
    "ppo_repro.commands.cli",
    "ppo_repro.commands.progress",
    "ppo_repro.runs.language",
    "ppo_repro.runs.run",
    "ppo_repro.tracking.follower",
)

FORKABLE = {"jemalloc_bg_thd"}  # of Arrow's allocator, which lets go of its locks around a fork


def _end_with_parent() -> None:
    """End this process when the other end of its stdin closes, from now on."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    pipe = select.poll()
    pipe.register(0, 0)  # its end alone; what is written there, another process reads
    pipe.poll()
    os._exit(1)  # at once, as a kill would: records are whole or absent at every instant


def _on_disk() -> tuple[str, ...]:
    """What a run records of the code that computes it; it is read from the disk."""
    from importlib import metadata

    from ppo_repro.runs.environment import PACKAGES, code_digest

    return (code_digest(), *(metadata.version(package) for package in PACKAGES))


def _import() -> None:
    for name in LATER:
        importlib.import_module(name)
    tasks = Path("/proc/self/task")
    others = {(task / "comm").read_text().strip() for task in tasks.iterdir() if task.name != str(os.getpid())}
    if others - FORKABLE:  # a fork has only one thread, and the locks of the others for ever
        raise SystemExit(f"error: threads after the imports ({', '.join(sorted(others))}); no cell can be forked here")
    gc.collect()
    gc.freeze()  # so that collections in a cell leave the pages alone that all cells share


def _read_line() -> str:
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)  # not ahead: the next process of this program reads on where this one stops
        if not byte:
            return ""
        line += byte
    return line.decode()


def _become_cell(answers: int, log: str, arguments: list[str]) -> None:
    """Turn this forked process into what `one` is, with its streams and session."""
    os.close(answers)
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    _end_with_parent()
    sys.argv = ["ppo-repro", *arguments]


def _forked(line: str) -> None:
    """Fork a cell for each line, the first of which may be given, until stdin closes."""
    before = _on_disk()
    _import()
    answers = os.dup(1)
    os.dup2(2, 1)
    line = line or _read_line()
    while line:
        if _on_disk() != before:  # a cell records what is there now, so that has to be what computes it
            os.dup2(answers, 1)
            os.execv(sys.executable, [sys.executable, "-m", "ppo_repro.commands.grid_cells", "forked", line])
        log, arguments = json.loads(line)
        with interrupts.held():
            pid = os.fork()
            if pid == 0:
                _become_cell(answers, log, arguments)
                _run()
        os.write(answers, b"%d\n" % pid)
        _, status = os.waitpid(pid, 0)
        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(status))
        line = _read_line()


def _run() -> None:
    runpy.run_module("ppo_repro", run_name="__main__")


def main() -> None:
    """Run what the command line names."""
    way, *arguments = sys.argv[1:]
    if way == "forked":
        _forked(*arguments or [""])
    else:
        assert way == "one", way
        _end_with_parent()
        sys.argv = ["ppo-repro", *arguments]
        _run()


if __name__ == "__main__":
    main()
