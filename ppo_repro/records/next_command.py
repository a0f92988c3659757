"""Say with which command a run that ended early goes on. Imports are few, so that --help is quick."""

from __future__ import annotations

import shlex
from pathlib import Path

from ppo_repro.base.files import MANIFEST
from ppo_repro.base.processes import processes


def how_to_go_on(run_dir: Path) -> str:
    """Return a sentence: from which iteration `resume` continues a run, and what it computes again."""
    if not (run_dir / MANIFEST).exists():
        return "nothing was recorded; start it again"
    (start, done), resume = _recorded(run_dir), f"`ppo-repro resume {shlex.quote(str(run_dir))}`"
    size = processes()[1]
    if size > 1:
        resume += f" (in native numerics with {size} processes)"
    if not start:
        return f"{done} iterations are recorded, without a checkpoint: {resume} computes all of them again"
    again = f"computes {done - start} again" if done > start else "computes none again"
    return f"{done} iterations are recorded; {resume} goes on from iteration {start} and {again}"


def _recorded(run_dir: Path) -> tuple[int, int]:
    """Return the last iteration to go on from (0 without a checkpoint), and how many iterations are recorded."""
    from ppo_repro.records import manifest
    from ppo_repro.records.folder import starts_of

    head = manifest.load_head(run_dir)
    return max(starts_of(run_dir, head), default=0), head.num_iterations


def how_to_repair(run_dir: Path, field: str) -> str:
    """Return a sentence on how to continue after the user's function of `field` failed.

    `resume` calls the copy of the function in the run folder.
    """
    start, done = _recorded(run_dir)
    if not start:
        return f"{done} iterations are recorded, without a checkpoint: correct the function and start again"
    name = "FILE.py" if field == "task.path" else "FILE.py:NAME"
    return (
        f"{done} iterations are recorded: correct the function in your own file, and go on from iteration {start} "
        f"with `ppo-repro fork {shlex.quote(str(run_dir))} --set {field}={name}`"
    )
