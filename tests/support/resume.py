"""Runs recorded with their states on the way, and runs in processes of their own that can be killed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ppo_repro.config.run import RunConfig
from ppo_repro.config.section import run_folder
from ppo_repro.records import manifest
from ppo_repro.watcher import Silent
from tests.support.language import run
from tests.support.paths import SMALL
from tests.support.runs import small_config

OTHER_LAYOUT = ["layout.padding=left", "layout.rollout_slots=20", "layout.update_micro_batch=9"]
THREADS = ["layout.threads=2", "layout.forward_micro_batch=20", "layout.prefill_chunk=2"]


class Snapshots(Silent):
    """Copies the run folder after every iteration: what a process killed at that moment leaves behind."""

    def __init__(self, run_dir: Path, folder: Path) -> None:
        self.run_dir, self.folder = run_dir, folder

    def iteration(self, done: int, total: int, figures: str) -> None:
        shutil.copytree(self.run_dir, self.folder / str(done))


@dataclass(frozen=True)
class Recorded:
    """An uninterrupted run and its states on the way, by number of iterations."""

    whole: Path
    parts: Path

    def copy(self, iterations: int, tmp_path: Path) -> Path:
        return Path(shutil.copytree(self.parts / str(iterations), tmp_path / "run"))

    def require_same(self, run_dir: Path) -> None:
        """All of the manifest: digests of all tables, final results, fingerprint; and the trained policy.

        Only the notes differ: they say how often the run was resumed, and on what.
        """
        found, whole = manifest.load(run_dir), manifest.load(self.whole)
        # the bytes of the files, and so those of the log, depend on timings
        assert found == whole.model_copy(update={"notes": found.notes, "log_digest": found.log_digest})
        kept = {path.name for path in run_dir.glob("*.json")} - {manifest.FILE_NAME}
        assert kept >= set(found.notes) >= {"environment.json"}, "a kill may come between a note and the manifest"
        assert files(run_dir / "checkpoints" / "final") == files(self.whole / "checkpoints" / "final")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def record(config: RunConfig, folder: Path) -> Recorded:
    run_dir = run_folder(config, folder / "whole")
    run(config, folder / "whole", Snapshots(run_dir, folder / "parts"))
    return Recorded(run_dir, folder / "parts")


def newest(run_dir: Path) -> Path:
    return sorted((run_dir / "checkpoints").glob("iteration-*"))[-1]


def launch(command: str, *arguments: str | Path, before: str = "") -> subprocess.Popen[str]:
    """`ppo-repro` in a process of its own, after the Python statements `before`."""
    program = f"{before}\nfrom ppo_repro.commands.cli import main\nmain()"
    return subprocess.Popen(
        [sys.executable, "-c", program, command, *map(str, arguments)], stderr=subprocess.PIPE, text=True
    )


def launch_run(out: Path, *overrides: str, before: str = "") -> tuple[subprocess.Popen[str], Path]:
    sets = [part for override in overrides for part in ("--set", override)]
    return launch("run", SMALL, "--out", out, *sets, before=before), run_folder(small_config(*overrides), out)


def wait_until(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not reached():
        assert time.monotonic() < deadline and process.poll() is None, "the run did not get that far"
        time.sleep(0.01)


def recorded_iterations(run_dir: Path) -> int:
    return len(list((run_dir / "records" / "iterations").glob("*.parquet")))


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"


def require_as_uninterrupted(run_dir: Path, expected: Path) -> None:
    found, whole = manifest.load(run_dir), manifest.load(expected)
    assert (found.status, found.fingerprint) == ("complete", whole.fingerprint)
    assert (found.final, found.iterations) == (whole.final, whole.iterations)
