"""Copies of a run or grid elsewhere: of what is recorded already, or by a process beside a run that works.

The process keeps a slow or dead server from stopping or breaking the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import masked, say

END_SECONDS = 60.0  # how long the command waits for the copies after a run
GRID_END_SECONDS = 600.0  # after a grid, whose page reads all of its runs
MLFLOW, TENSORBOARD = "mlflow", "tensorboard"
OPTIONS = {MLFLOW: "--uri", TENSORBOARD: "--tensorboard"}  # of `ppo-repro track`


@dataclass
class Copies:
    """Where the copies are: lines for people, and the same as fields for JSON."""

    lines: list[str] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)


def require_tensorboard(events: Path | None) -> None:
    """Raise UserError if event files are asked for and cannot be written, before a run begins."""
    if events is not None and find_spec("tensorboardX") is None:
        raise UserError(
            "--tensorboard: needs the package tensorboardX; install it with `pip install 'ppo_repro[tensorboard]'`"
        )


def copy(folder: Path, kind: str, target: str, is_over: Callable[[float], bool] = lambda seconds: True) -> Copies:
    """Copy a run or grid until it is over; without lines if nothing was recorded.

    `is_over` waits at most so many seconds, and says whether the process that writes has ended. UserError if records
    are damaged or the target cannot be written.
    """
    if kind == MLFLOW:
        from ppo_repro.tracking import mlflow_copy  # MLflow takes seconds to import

        place = mlflow_copy.copy(folder, target, is_over)
        return Copies() if place is None else Copies(place.lines(target), {kind: place.fields(target)})
    from ppo_repro.tracking import tensorboard_copy

    if not tensorboard_copy.copy(folder, Path(target), is_over):
        return Copies()
    return Copies(tensorboard_copy.lines(Path(target)), {kind: target})


@contextmanager
def followed(folder: Path, copies: Copies, uri: str | None, tensorboard: Path | None = None) -> Iterator[None]:
    """Copy the run or grid made in this block by processes beside it, and add to `copies` where the copies are.

    A failure is reported, not raised.
    """
    targets = {MLFLOW: uri, TENSORBOARD: None if tensorboard is None else str(tensorboard)}
    processes = [(kind, target, _start(folder, kind, target)) for kind, target in targets.items() if target is not None]
    try:
        yield
    finally:
        for kind, target, process in processes:
            _wait(process, folder, kind, target, copies)


def _start(folder: Path, kind: str, target: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ppo_repro.tracking.follower", str(folder), kind, target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C goes to the run alone
    )


def _wait(process: subprocess.Popen[str], folder: Path, kind: str, target: str, copies: Copies) -> None:
    patience = GRID_END_SECONDS if (folder / "grid.yaml").exists() else END_SECONDS
    problem = ""
    try:
        out, _ = process.communicate(timeout=patience)  # closes its stdin, which tells it that the run is over
        *_, last = ["", *out.splitlines()]  # MLflow's client prints too
        if process.returncode:
            problem = f"tracking failed: {last or f'its process ended with {process.returncode}'}"
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        problem = f"tracking did not finish within {patience:.0f} s after the run"
    if problem:
        later = f"`ppo-repro track {folder} {OPTIONS[kind]} {masked(target)}`"
        say(f"{problem}; the records are complete; copy them later with {later}")
        return
    found = json.loads(last)
    copies.lines += found["lines"]
    copies.fields |= found["fields"]


def main(folder: Path, kind: str, target: str) -> None:
    """Copy the run or grid until stdin closes. Exits with 1 and the reason on stdout if that fails."""
    ended = threading.Event()

    def wait() -> None:
        os.read(0, 1)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    try:
        copies = copy(folder, kind, target, ended.wait)
    except UserError as error:
        print(error)
        sys.exit(1)
    print(json.dumps({"lines": copies.lines, "fields": copies.fields}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
