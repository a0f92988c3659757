"""The word `latest`, which stands for the newest recorded run in every command that takes a run folder."""

from __future__ import annotations

import os
from pathlib import Path

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import MANIFEST, check_path, folders_with

RUNS = Path("runs")  # where commands put runs unless --out says otherwise
LATEST = "latest"


def run_named(text: str | Path) -> Path:
    """Return the path of a run folder. `latest` is the newest run in `runs`, unless a file here has that name.

    Raises ValueError if the text cannot be a path, UserError if there is no run.
    """
    return latest_run() if str(text) == LATEST and not os.path.lexists(text) else Path(check_path(str(text)))


def latest_run(root: Path = RUNS) -> Path:
    """Return the run below `root` that was written last. Raises UserError if there is none."""
    runs = list(folders_with(root, MANIFEST))
    if not runs:
        raise UserError(f"{LATEST}: there is no run in {root}; give the folder of a run, or go to where {root} is")
    return max(runs, key=lambda run_dir: (written_at(run_dir), str(run_dir)))


def written_at(run_dir: Path) -> float:
    """Return the time of the manifest's last write, in seconds since 1970; 0 if there is no manifest."""
    try:
        return (run_dir / MANIFEST).stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0
