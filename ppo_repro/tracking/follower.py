"""A process beside a run or grid that copies its records elsewhere, so that no server can slow or break the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppo_repro.errors import UserError
from ppo_repro.output import masked, say

END_SECONDS = 60.0  # how long the command waits for the copies after a run
GRID_END_SECONDS = 600.0  # after a grid, whose page reads all of its runs
MLFLOW, TENSORBOARD = "mlflow", "tensorboard"


@dataclass
class Followers:
    """What the processes beside a run said at its end: lines for people, and the same as fields for JSON."""

    lines: list[str] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)


@contextmanager
def followed(folder: Path, uri: str | None, tensorboard: Path | None = None) -> Iterator[Followers]:
    """Copy the run or grid made in this block by processes beside it. A failure is reported, not raised."""
    targets = {MLFLOW: uri, TENSORBOARD: None if tensorboard is None else str(tensorboard)}
    processes = [(kind, target, _start(folder, kind, target)) for kind, target in targets.items() if target is not None]
    said = Followers()
    try:
        yield said
    finally:
        for kind, target, process in processes:
            _wait(process, folder, kind, target, said)


def _start(folder: Path, kind: str, target: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ppo_repro.tracking.follower", str(folder), kind, target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C goes to the run alone
    )


def _wait(process: subprocess.Popen[str], folder: Path, kind: str, target: str, said: Followers) -> None:
    option = "--uri" if kind == MLFLOW else "--tensorboard"
    later = f"the records are complete; copy them later with `ppo-repro track {folder} {option} {masked(target)}`"
    patience = GRID_END_SECONDS if (folder / "grid.yaml").exists() else END_SECONDS
    late = False
    try:
        out, _ = process.communicate(timeout=patience)  # closes its stdin, which tells it that the run is over
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        late = True
    *_, last = ["", *out.splitlines()]
    if out.startswith("{"):  # the copy is there; what is late, or has failed, is the page about the run
        copied = json.loads(out.splitlines()[0])
        said.lines += copied["lines"]
        said.fields |= copied["fields"]
        if late or process.returncode != 0:
            say(f"tracking: the report page is not in the copy ({'it took too long' if late else last}); {later}")
    elif late:
        say(f"tracking did not finish within {patience:.0f} s after the run; {later}")
    elif process.returncode != 0:
        say(f"tracking failed: {last or f'its process ended with {process.returncode}'}; {later}")


def _say_copied(lines: Sequence[str], fields: dict[str, Any]) -> None:
    print(json.dumps({"lines": lines, "fields": fields}), flush=True)


def main(folder: Path, kind: str, target: str) -> None:
    """Copy the run or grid until stdin closes. Exits with 1 and the reason on stdout if that fails."""
    ended = threading.Event()

    def wait() -> None:
        os.read(0, 1)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    try:
        if kind == MLFLOW:
            from ppo_repro.tracking import mlflow_copy

            place = mlflow_copy.copy(folder, target, ended.wait)
            if place is not None:
                _say_copied(place.lines(target), {kind: place.fields(target)})
                mlflow_copy.add_report(folder, target, place)
        else:
            from ppo_repro.tracking import tensorboard_copy

            if tensorboard_copy.copy(folder, Path(target), ended.wait):
                _say_copied(tensorboard_copy.lines(Path(target)), {kind: target})
    except UserError as error:
        print(error)
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
