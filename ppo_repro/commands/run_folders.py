"""Run folders under a folder: which there are, and which one was written last."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from ppo_repro.clock import duration
from ppo_repro.errors import UserError
from ppo_repro.files import folders_with, has_writer
from ppo_repro.output import print_result

RUNS = Path("runs")  # where commands put runs unless --out says otherwise
LATEST = "latest"  # what stands for the newest of them
MANIFEST = "manifest.json"


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
    runs = sorted(map(_listed, folders_with(arguments.folder, MANIFEST)), key=lambda run: float(run["age_seconds"]))
    print_result(arguments.json, {"runs": runs}, _lines(runs, arguments.folder))
    return 0


def _written(run_dir: Path) -> float:
    try:
        return (run_dir / MANIFEST).stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0


def _listed(run_dir: Path) -> dict[str, Any]:
    """One run folder; its state is `damaged` if the manifest cannot be read."""
    from ppo_repro.records import manifest

    listed = {"folder": str(run_dir), "kind": "-", "state": "damaged", "iterations": 0, "fingerprint": "-"}
    try:
        head = manifest.load_head(run_dir)
        listed |= {"kind": head.kind, "state": state(run_dir, head.status), "iterations": head.num_iterations}
        listed["fingerprint"] = head.fingerprint
    except UserError:
        pass
    return {**listed, "age_seconds": max(time.time() - _written(run_dir), 0.0)}  # since the manifest was written


def state(run_dir: Path, status: str) -> str:
    """The status of a manifest; `killed` if it is `running` and no process of this machine writes the run."""
    return "killed" if status == "running" and not has_writer(run_dir) else status


def how_to_go_on(run_dir: Path, resume: str) -> str:
    """What an ended process left: from which iteration `resume`, a command, goes on, and what it computes again."""
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


def _lines(runs: list[dict[str, Any]], root: Path) -> list[str]:
    if not runs:
        return [f"no run in {root}"]
    row = f"{{folder:<{max(len(run['folder']) for run in runs)}}}  {{kind:<9}}{{state:<12}}{{iterations:>10}}  "
    head = row.format(folder="run", kind="kind", state="state", iterations="iterations") + f"{'fingerprint':<13}age"
    return [
        head,
        *(row.format(**run) + f"{run['fingerprint'][:12]:<13}{duration(run['age_seconds'])}" for run in runs),
    ]
