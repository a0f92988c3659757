"""Runs recorded with their states on the way, and runs in processes of their own that can be killed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ppo_repro.base.files import MANIFEST
from ppo_repro.base.watcher import Silent
from ppo_repro.config.inputs import run_folder
from ppo_repro.config.run import RunConfig
from ppo_repro.records import manifest
from tests.support.language import run


class Snapshots(Silent):
    """Copies the run folder after every iteration: what a process killed at that moment leaves behind."""

    def __init__(self, run_dir: Path, folder: Path) -> None:
        self.run_dir, self.folder = run_dir, folder

    def iteration(self, done: int, total: int, figures: str, seconds: float) -> None:
        shutil.copytree(self.run_dir, self.folder / str(done))


class Stopped(Silent):
    """Ends a run, as Ctrl-C does, after some of its iterations."""

    def __init__(self, after: int) -> None:
        self.after = after

    def iteration(self, done: int, total: int, figures: str, seconds: float) -> None:
        if done == self.after:
            raise KeyboardInterrupt


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
        kept = {path.name for path in run_dir.glob("*.json")} - {MANIFEST}
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


def require_as_uninterrupted(run_dir: Path, expected: Path) -> None:
    found, whole = manifest.load(run_dir), manifest.load(expected)
    assert (found.status, found.fingerprint) == ("complete", whole.fingerprint)
    assert (found.final, found.iterations) == (whole.final, whole.iterations)
