"""A process beside a run that copies its records into MLflow, so that no tracking server can slow or break the run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ppo_repro.errors import UserError
from ppo_repro.output import say
from ppo_repro.secrets import masked

END_SECONDS = 60.0  # how long the command waits for the copy after the run


@contextmanager
def followed(run_dir: Path, uri: str | None) -> Iterator[None]:
    """Copy the run made in this block into MLflow by a process beside it. A failure is reported, not raised."""
    if uri is None:
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "ppo_repro.tracking.follower", str(run_dir), uri],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C goes to the run alone
    )
    try:
        yield
    finally:
        _wait_and_report(process, run_dir, uri)


def _wait_and_report(process: subprocess.Popen[str], run_dir: Path, uri: str) -> None:
    later = f"the records are complete; copy them later with `ppo-repro track {run_dir} --uri {masked(uri)}`"
    try:
        out, _ = process.communicate(timeout=END_SECONDS)  # closes its stdin, which tells it that the run is over
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        say(f"tracking did not finish within {END_SECONDS:.0f} s after the run; {later}")
        return
    if process.returncode != 0:
        reason = out.strip() or f"its process ended with {process.returncode}"
        say(f"tracking failed: {reason}; {later}")


def main(run_dir: Path, uri: str) -> None:
    """Copy the run until stdin closes. Exits with 1 and the reason on stdout where the store does not answer."""
    ended = threading.Event()

    def wait() -> None:
        os.read(0, 1)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    from ppo_repro.tracking.mlflow_copy import follow

    try:
        follow(run_dir, uri, ended.wait)
    except UserError as error:
        print(error)
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
