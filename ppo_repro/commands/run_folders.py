"""Run folders under a folder: which there are, and which one was written last."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ppo_repro.clock import duration
from ppo_repro.errors import UserError
from ppo_repro.files import folders_with, has_writer
from ppo_repro.output import print_result

RUNS = Path("runs")  # where commands put runs unless --out says otherwise
LATEST = "latest"  # what stands for the newest of them
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Listed:
    """One run folder."""

    folder: str
    kind: str
    state: str  # as in its manifest; `killed` where that says running and nobody writes it; `damaged`
    iterations: int
    fingerprint: str
    age_seconds: float  # since the manifest was written


def latest_run(root: Path = RUNS) -> Path:
    """The run below `root` that was written last; UserError where there is none."""
    found = list(folders_with(root, MANIFEST))
    if not found:
        raise UserError(f"{LATEST}: there is no run in {root}; give the folder of a run, or go to where {root} is")
    return max(found, key=lambda run_dir: (_written(run_dir), str(run_dir)))


def ls_command(arguments: argparse.Namespace) -> int:
    """List the runs of a folder, the newest first: state, iterations, fingerprint, age."""
    if not arguments.folder.is_dir():
        raise UserError(f"{arguments.folder}: no such folder; give the one that runs went to")
    found = sorted(
        (_listed(run_dir) for run_dir in folders_with(arguments.folder, MANIFEST)), key=lambda run: run.age_seconds
    )
    print_result(arguments.json, {"runs": [asdict(run) for run in found]}, _lines(found, arguments.folder))
    return 0


def _written(run_dir: Path) -> float:
    try:
        return (run_dir / MANIFEST).stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0


def _listed(run_dir: Path) -> Listed:
    from ppo_repro.records import manifest

    age = max(time.time() - _written(run_dir), 0.0)
    try:
        head = manifest.load_head(run_dir)
    except UserError:
        return Listed(str(run_dir), "-", "damaged", 0, "-", age)
    return Listed(str(run_dir), head.kind, state(run_dir, head.status), head.num_iterations, head.fingerprint, age)


def state(run_dir: Path, status: str) -> str:
    """The status of a manifest; `killed` if it is `running` and no process of this machine writes the run."""
    return "killed" if status == "running" and not has_writer(run_dir) else status


def how_to_go_on(run_dir: Path, resume: str) -> str:
    """What an ended process left: from which iteration `resume`, a command, goes on, and what it computes again."""
    if not (run_dir / MANIFEST).exists():
        return "nothing was recorded; start it again"
    from ppo_repro.records import manifest
    from ppo_repro.records.contents import starts_of

    head = manifest.load_head(run_dir)
    start, done = max(starts_of(run_dir, head), default=0), head.num_iterations
    if not start:
        return f"{done} iterations are recorded, without a checkpoint: {resume} computes all of them again"
    again = f"computes {done - start} again" if done > start else "computes none again"
    return f"{done} iterations are recorded; {resume} goes on after iteration {start} and {again}"


def _lines(found: list[Listed], root: Path) -> list[str]:
    if not found:
        return [f"no run in {root}"]
    width = max(len(run.folder) for run in found)
    lines = [f"{'run':<{width}}  {'kind':<9}{'state':<12}{'iterations':>10}  {'fingerprint':<13}age"]
    return lines + [
        f"{run.folder:<{width}}  {run.kind:<9}{run.state:<12}{run.iterations:>10}  {run.fingerprint[:12]:<13}"
        f"{duration(run.age_seconds)}"
        for run in found
    ]
