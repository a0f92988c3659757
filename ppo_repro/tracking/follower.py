"""A process beside a run that copies its records elsewhere, so that no tracking server can slow or break the run."""

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

END_SECONDS = 60.0  # how long the command waits for the copies after the run
MLFLOW, TENSORBOARD = "mlflow", "tensorboard"


@dataclass
class Followers:
    """What the processes beside a run said at its end: lines for people, and the same as fields for JSON."""

    lines: list[str] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)


@contextmanager
def followed(run_dir: Path, uri: str | None, tensorboard: Path | None = None) -> Iterator[Followers]:
    """Copy the run made in this block by processes beside it. A failure is reported, not raised."""
    targets = [] if uri is None else [(MLFLOW, uri)]
    targets += [] if tensorboard is None else [(TENSORBOARD, str(tensorboard))]
    processes = [(*target, _start(run_dir, *target)) for target in targets]
    said = Followers()
    try:
        yield said
    finally:
        for kind, target, process in processes:
            _wait(process, run_dir, kind, target, said)


def _start(run_dir: Path, kind: str, target: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ppo_repro.tracking.follower", str(run_dir), kind, target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C goes to the run alone
    )


def _wait(process: subprocess.Popen[str], run_dir: Path, kind: str, target: str, said: Followers) -> None:
    option = "--uri" if kind == MLFLOW else "--tensorboard"
    later = f"the records are complete; copy them later with `ppo-repro track {run_dir} {option} {masked(target)}`"
    late = False
    try:
        out, _ = process.communicate(timeout=END_SECONDS)  # closes its stdin, which tells it that the run is over
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        late = True
    *_, last = ["", *out.splitlines()]
    if out.startswith("{"):  # the copy is there; what is late, or has failed, is the page about the run
        copied = json.loads(out.splitlines()[0])
        said.lines += copied["lines"]
        said.fields[kind] = copied["fields"]
        if late or process.returncode != 0:
            say(f"tracking: the report page is not in the copy ({'it took too long' if late else last}); {later}")
    elif late:
        say(f"tracking did not finish within {END_SECONDS:.0f} s after the run; {later}")
    elif process.returncode != 0:
        say(f"tracking failed: {last or f'its process ended with {process.returncode}'}; {later}")


def _say_copied(lines: Sequence[str], fields: dict[str, Any]) -> None:
    print(json.dumps({"lines": lines, "fields": fields}), flush=True)


def _follow_mlflow(run_dir: Path, uri: str, ended: threading.Event) -> None:
    from ppo_repro.tracking import links
    from ppo_repro.tracking.mlflow_copy import add_report, follow

    place = follow(run_dir, uri, ended.wait)
    if place is not None:
        _say_copied(links.lines(uri, place), links.fields(uri, place))
        add_report(run_dir, uri, place)


def _follow_tensorboard(run_dir: Path, folder: Path, ended: threading.Event) -> None:
    from ppo_repro.tracking.tensorboard_copy import follow, lines

    events = follow(run_dir, folder, ended.wait)
    if events is not None:
        _say_copied(lines(folder), {"folder": str(folder), "events": str(events)})


def main(run_dir: Path, kind: str, target: str) -> None:
    """Copy the run until stdin closes. Exits with 1 and the reason on stdout where that fails."""
    ended = threading.Event()

    def wait() -> None:
        os.read(0, 1)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    try:
        if kind == MLFLOW:
            _follow_mlflow(run_dir, target, ended)
        else:
            _follow_tensorboard(run_dir, Path(target), ended)
    except UserError as error:
        print(error)
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
