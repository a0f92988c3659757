"""Copy a recorded run or grid, or a run in progress, by a process beside the run.

A slow or dead server, or a function that fails, cannot stop the run, because it has a process of its own.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import did_you_mean, masked, one_line, say
from ppo_repro.user.file import file_and_name

END_SECONDS = 60.0  # for which the command waits for the copies after a run
GRID_END_SECONDS = 600.0  # after a grid, whose page reads all of its runs
MLFLOW, WANDB, TENSORBOARD, FUNCTION = "mlflow", "wandb", "tensorboard", "function"
TRACKING_URI = "MLFLOW_TRACKING_URI"  # MLflow's variable: the store unless the command names one
DEFAULT_URI = "sqlite:///mlflow.db"
PLACE = "PPO_REPRO_TRACK_PLACE"  # the variable in which the process gets the place of its target
DONE = "copies: "  # begins the line in which the process says where the copies are
SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")


@dataclass(frozen=True)
class Target:
    """Destination of copies: an MLflow store, W&B, TensorBoard or a function."""

    kind: str
    place: str  # URI, folder or FILE.py:FUNCTION; empty for W&B, whose client has settings for it

    @property
    def option(self) -> str:
        """Return the option of `ppo-repro track` for this place."""
        option = "--tensorboard" if self.kind == TENSORBOARD else "--uri"
        return f"{option} {shlex.quote(masked(self.place or self.kind))}"


@dataclass
class Copies:
    """Addresses of finished copies: printed lines, and the same as fields for JSON."""

    lines: list[str] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)


def targets_of(tracks: Sequence[str], tensorboard: Path | None) -> tuple[Target, ...]:
    """Return the places of `--track` and `--tensorboard`.

    Raises UserError for an impossible place or a package that is not installed.
    """
    targets = [_target(track) for track in dict.fromkeys(tracks)]
    if len({target.kind for target in targets}) < len(targets):
        raise UserError(f"--track: {masked(' and '.join(tracks))} are of one kind; give one of each kind")
    if tensorboard is not None:
        _require("tensorboardX", "--tensorboard", TENSORBOARD)
        targets.append(Target(TENSORBOARD, str(tensorboard)))
    return tuple(targets)


def _target(track: str) -> Target:
    if track == WANDB:
        _require(WANDB, "--track wandb", WANDB)
        return Target(WANDB, "")
    if track == MLFLOW:
        uri = os.environ.get(TRACKING_URI, DEFAULT_URI)
        _check_uri(uri, TRACKING_URI)
        return Target(MLFLOW, uri)
    if "://" not in track and ".py" in track:
        _check_function(track)
        return Target(FUNCTION, track)
    _check_uri(track, "--track")
    return Target(MLFLOW, track)


def _require(package: str, option: str, extra: str) -> None:
    if find_spec(package) is None:
        raise UserError(f"{option}: needs the package {package}; install it with `pip install 'ppo_repro[{extra}]'`")


def _check_function(path: str) -> None:
    """Raise UserError unless a new process can load the function of `FILE.py:FUNCTION` and call it."""
    file_and_name("--track", path)
    command = [sys.executable, "-m", "ppo_repro.tracking.function_copy", path]
    tried = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if tried.returncode:
        *_, last = ["", *tried.stderr.splitlines()]
        raise UserError(last or f"--track {path}: fails to load (its process ended with {tried.returncode})")


def _check_uri(uri: str, source: str) -> None:
    """Raise UserError for an address that MLflow's client does not accept."""
    scheme, separator, path = uri.partition("://")
    if uri != "databricks" and (scheme.partition("+")[0] not in SCHEMES or not separator):
        raise UserError(
            f"{source} {masked(uri)!r}: must begin with one of {', '.join(SCHEMES)} and ://, or be {MLFLOW}, {WANDB} "
            f"or FILE.py:FUNCTION{did_you_mean(uri, (WANDB, MLFLOW))}"
        )
    if scheme == "sqlite" and not path.removeprefix("/"):
        raise UserError(f"{source} {uri}: keeps nothing; name a file, such as {DEFAULT_URI}")


def copy(folder: Path, target: Target, is_over: Callable[[float], bool] = lambda seconds: True) -> Copies:
    """Copy a run or grid until it is over, and return the copies; without records there are no lines.

    `is_over` waits for at most the given seconds, and returns whether the process that writes records has ended. Raises
    UserError if records are damaged or the target cannot be written.
    """
    tracker = import_module(f"ppo_repro.tracking.{target.kind}_copy")  # MLflow takes seconds to import
    copied = tracker.copy(folder, target.place, is_over)
    return Copies() if copied is None else Copies(copied[0], {target.kind: copied[1]})


@contextmanager
def followed(folder: Path, copies: Copies, targets: Sequence[Target]) -> Iterator[None]:
    """Start a process per target that copies the run of this block, and add the addresses of the copies to `copies`.

    A failure is printed, not raised.
    """
    processes = [(target, _start(folder, target)) for target in targets]
    try:
        yield
    finally:
        for target, process in processes:
            if process is not None:
                _wait(process, folder, target, copies)


def _start(folder: Path, target: Target) -> subprocess.Popen[str] | None:
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "ppo_repro.tracking.follower", str(folder), target.kind],
            env={**os.environ, PLACE: target.place},  # every user sees arguments, and a URI may have a password
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if target.kind == FUNCTION else subprocess.DEVNULL,  # the output of a user's function is shown
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C goes to the run alone
        )
    except OSError as error:  # the system has no memory or no process left
        say(f"tracking did not start ({error.strerror}); {_later(folder, target)}")
        return None


def _wait(process: subprocess.Popen[str], folder: Path, target: Target, copies: Copies) -> None:
    from ppo_repro.records.grid import GRID

    patience = GRID_END_SECONDS if (folder / GRID).exists() else END_SECONDS
    try:
        out, _ = process.communicate(timeout=patience)  # closes its stdin: the run is over
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()  # not for the end of its output: a process that a user's function forked may keep the pipe
        assert process.stdout is not None
        process.stdout.close()
        problem = f"tracking did not finish within {patience:.0f} s after the run"
    else:
        *_, answer = ["", *out.splitlines()]
        if answer.startswith(DONE):
            outcome = json.loads(answer.removeprefix(DONE))
            copies.lines += outcome["lines"]
            copies.fields |= outcome["fields"]
            return
        problem = f"tracking failed: {answer or f'its process ended with {process.returncode}'}"
    say(f"{problem}; {_later(folder, target)}" if folder.exists() else problem)


def _later(folder: Path, target: Target) -> str:
    return f"copy the records later with `ppo-repro track {shlex.quote(str(folder))} {target.option}`"


def _tell_end(ended: threading.Event) -> None:
    """Wait until stdin closes, which is when the run ends, and set the event."""
    os.read(0, 1)
    ended.set()


def main(folder: Path, target: Target) -> None:
    """Copy the run or grid until stdin closes; if that fails, print the reason on stdout and exit with 1.

    What libraries and functions print goes to stderr: nobody reads stdout before the end, and a full pipe blocks.
    """
    answer = os.fdopen(os.dup(1), "w", errors="backslashreplace")
    os.register_at_fork(after_in_child=answer.close)  # a process that is left behind would keep the run waiting
    os.dup2(2, 1)
    ended = threading.Event()
    threading.Thread(target=_tell_end, args=(ended,), daemon=True).start()
    try:
        copies = copy(folder, target, ended.wait)
    except UserError as error:
        if target.kind == FUNCTION:
            say(f"warning: {one_line(error)}; the run goes on")
        print(one_line(error), file=answer, flush=True)
        sys.exit(1)
    # flushed: threads of libraries may abort the process while it ends, after all copies are made
    print(DONE + json.dumps({"lines": copies.lines, "fields": copies.fields}), file=answer, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Target(sys.argv[2], os.environ[PLACE]))
