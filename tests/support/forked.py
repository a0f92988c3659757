"""Command lines in forks of a process that has imported everything: importing would take most of the time."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from ppo_repro.commands.cli import exit_code_of


def execute(log: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Execute a command line in this process, which writes into a file, and end with its exit code."""
    os.environ.update(environment)
    with log.open("w") as out, redirect_stdout(out), redirect_stderr(out):
        sys.exit(exit_code_of(command))


def forked(log: Path, *command: str | Path, **environment: str) -> ForkServerProcess:
    """Start a command line, with more variables of the environment; its output is in `log`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "ppo_repro.runs.run", "ppo_repro.runs.fork", "ppo_repro.runs.language"])
    process = context.Process(target=execute, args=(log, list(map(str, command)), environment))
    process.start()
    return process
