"""What the command line does with control runs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from ppo_repro.config.control import load_control_config
from ppo_repro.control.summary import iteration_lines, speeds, summarise, verdicts
from ppo_repro.errors import UserError
from ppo_repro.output import print_json
from ppo_repro.ranks import Ranks
from ppo_repro.records.manifest import Manifest
from ppo_repro.runs.progress import ConsoleProgress
from ppo_repro.runs.run import Rerun
from ppo_repro.watcher import Watcher


def run(path: Path, overrides: Sequence[str], out: Path, as_json: bool) -> int:
    """Run a configuration and print its summary."""
    config = load_control_config(path, overrides)
    from ppo_repro.control.run import run as run_control  # gymnasium, which not everybody has

    with ConsoleProgress() as watcher:
        run_dir, seconds = run_control(config, out, watcher)
    return _report(run_dir, seconds, as_json)


def resume(run_dir: Path, overrides: Sequence[str], as_json: bool) -> int:
    """Complete a run that was ended and print its summary."""
    from ppo_repro.control.run import resume as resume_control

    with ConsoleProgress() as watcher:
        recorded = resume_control(run_dir, watcher, overrides)
    print(f"computed again from the beginning; {recorded} recorded iterations came out identical", file=sys.stderr)
    return _report(run_dir, None, as_json)


def rerun_alone(run_dir: Path, watcher: Watcher, overrides: Sequence[str], ranks: Ranks) -> Rerun:
    """`control.run.rerun`; UserError where several processes were started."""
    if ranks.size > 1:
        raise UserError(f"{run_dir}: a control run works in one process; start this command without torchrun")
    from ppo_repro.control.run import rerun as rerun_control

    return rerun_control(run_dir, watcher, overrides)


def show(run_dir: Path, manifest: Manifest, as_json: bool) -> int:
    """Print what a recorded run did, complete or not."""
    if as_json:
        return _report(run_dir, None, True)
    print(f"{run_dir}: {manifest.status}, {len(manifest.iterations)} iterations")
    if manifest.iterations:
        print(iteration_lines(run_dir, 12).to_string(index=False, float_format=lambda x: f"{x:.4g}"))
    return _report(run_dir, None, False) if manifest.status == "complete" else 0


def _report(run_dir: Path, seconds: dict[str, float] | None, as_json: bool) -> int:
    summary = summarise(run_dir, seconds)
    if as_json:
        print_json(dataclasses.asdict(summary))
        return 0
    print("\n".join([*verdicts(summary), *speeds(summary)]))
    print(f"fingerprint {summary.fingerprint}")
    print(f"records     {run_dir}")
    print(f"again       ppo-repro rerun {run_dir}")
    return 0
