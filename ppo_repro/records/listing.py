"""Which recorded runs a folder has, and the state of each. Nothing heavy is imported, so that --help is quick."""

from __future__ import annotations

from pathlib import Path

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import folders_with
from ppo_repro.base.lock import has_writer

RUNS = Path("runs")  # where commands put runs unless --out says otherwise
LATEST = "latest"  # what stands for the newest of them
MANIFEST = "manifest.json"


def latest_run(root: Path = RUNS) -> Path:
    """Find the run below `root` that was written last. Raises UserError where there is none."""
    found = list(folders_with(root, MANIFEST))
    if not found:
        raise UserError(f"{LATEST}: there is no run in {root}; give the folder of a run, or go to where {root} is")
    return max(found, key=lambda run_dir: (written_at(run_dir), str(run_dir)))


def written_at(run_dir: Path) -> float:
    """Return the time when the manifest was written last, in seconds since 1970; 0 if it is gone."""
    try:
        return (run_dir / MANIFEST).stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0


def state_of(run_dir: Path, status: str) -> str:
    """Return the status of a manifest; `killed` if it is `running` and no process of this machine writes the run."""
    return "killed" if status == "running" and not has_writer(run_dir) else status


def how_to_go_on(run_dir: Path, resume: str) -> str:
    """Say from which iteration `resume`, a command, continues an ended process, and what it computes again."""
    if not (run_dir / MANIFEST).exists():
        return "nothing was recorded; start it again"
    from ppo_repro.records import manifest
    from ppo_repro.records.folder import starts_of

    head = manifest.load_head(run_dir)
    start, done = max(starts_of(run_dir, head), default=0), head.num_iterations
    if not start:
        return f"{done} iterations are recorded, without a checkpoint: {resume} computes all of them again"
    again = f"computes {done - start} again" if done > start else "computes none again"
    return f"{done} iterations are recorded; {resume} goes on after iteration {start} and {again}"
