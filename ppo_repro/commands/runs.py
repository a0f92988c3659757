"""What each command does. Heavy imports wait until a command needs them, so that --help is quick."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_repro.errors import UserError
from ppo_repro.output import print_json, print_result, say

if TYPE_CHECKING:
    from ppo_repro.ranks import Ranks
    from ppo_repro.runs.diff import Difference
    from ppo_repro.runs.summary import Summary
    from ppo_repro.watcher import Watcher


def _environment_count(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"environment variable {name} = {text!r}: must be a count; torchrun sets it")
    return int(text)


def processes() -> tuple[int, int]:
    """(rank, number of processes) as torchrun sets them; (0, 1) without it."""
    size = _environment_count("WORLD_SIZE", 1)
    return (_environment_count("RANK", 0), size) if size > 1 else (0, 1)


@contextmanager
def _working_together() -> Iterator[tuple[Ranks, Watcher]]:
    """The processes of this command; the first one shows progress, the others are silent."""
    from ppo_repro.ranks import joined
    from ppo_repro.runs.progress import ConsoleProgress
    from ppo_repro.watcher import Silent

    with joined(*processes()) as ranks:
        if not ranks.is_first:
            yield ranks, Silent()
            return
        with ConsoleProgress() as watcher:
            yield ranks, watcher


def run_command(arguments: argparse.Namespace) -> int:
    """Run PPO, record every buffer, print a summary."""
    from ppo_repro.config.files import load_config

    with _working_together() as (ranks, watcher):
        config = load_config(arguments.config, arguments.set)
        from ppo_repro.runs.run import run, run_folder
        from ppo_repro.runs.summary import summarise
        from ppo_repro.tracking.follower import followed

        with followed(run_folder(config, arguments.out), arguments.track if ranks.is_first else None):
            run_dir, seconds = run(config, arguments.out, watcher, ranks, arguments.profile)
    if ranks.is_first:
        _report_run(summarise(run_dir, seconds), run_dir, arguments.json, arguments.profile)
    return 0


def control_command(arguments: argparse.Namespace) -> int:
    """Run PPO on a Gymnasium environment, record every buffer, print a summary."""
    from ppo_repro.commands import control

    return control.run(arguments.config, arguments.set, arguments.out, arguments.json)


def resume_command(arguments: argparse.Namespace) -> int:
    """Continue a run that was killed, interrupted or failed; exit 1 if what it computes again differs."""
    from ppo_repro.records.manifest import load

    if load(arguments.run).kind == "control":
        from ppo_repro.commands import control

        return control.resume(arguments.run, arguments.set, arguments.json)
    from ppo_repro.runs.progress import ConsoleProgress
    from ppo_repro.runs.resume import resume
    from ppo_repro.runs.summary import summarise

    with ConsoleProgress() as watcher:
        found = resume(arguments.run, watcher, arguments.set)
    again = found.recorded - found.start
    say(f"resumed after iteration {found.start}; {again} recorded iterations came out identical")
    _report_run(summarise(arguments.run), arguments.run, arguments.json)
    return 0


def _report_run(summary: Summary, run_dir: Path, as_json: bool, with_profile: bool = False) -> None:
    from ppo_repro.records.config_file import load_recorded_config
    from ppo_repro.runs.summary import profile, profile_lines, speeds, verdicts

    if as_json:
        profiled = {"profile": dataclasses.asdict(profile(run_dir))} if with_profile else {}
        print_json({**dataclasses.asdict(summary), **profiled})
        return
    config = load_recorded_config(run_dir)
    said = verdicts(summary, config.ppo.ratio_anchor, config.value.kind != "none")
    measured = profile_lines(profile(run_dir)) if with_profile else []
    print("\n".join([*said, *speeds(summary), *measured]))
    print(f"fingerprint {summary.fingerprint}")
    print(f"records     {run_dir}")
    print(f"policy      {run_dir / 'checkpoints' / 'final'}")
    print(f"again       ppo-repro rerun {run_dir}")


def rerun_command(arguments: argparse.Namespace) -> int:
    """Execute a recorded run again and compare every buffer; exit 1 at a difference."""
    from ppo_repro.records.reader import open_manifest

    with _working_together() as (ranks, watcher):
        if open_manifest(arguments.run).kind == "control":
            from ppo_repro.commands.control import rerun_alone as rerun
        else:
            from ppo_repro.runs.run import rerun
        report = rerun(arguments.run, watcher, arguments.set, ranks)
    if not ranks.is_first:
        return 0 if report.difference is None else 1
    identical = f"identical: {report.iterations} iterations, fingerprint {report.fingerprint}"
    return _report_difference(report.difference, arguments.json, identical)


def verify_command(arguments: argparse.Namespace) -> int:
    """Compare every file of a run folder with its recorded digest, without computing anything again."""
    from ppo_repro.runs.verify import verify

    found = verify(arguments.run)
    if arguments.json:
        print_json(dataclasses.asdict(found))
        return 0
    print(
        f"whole: {found.status}, {found.iterations} iterations in {found.tables} tables, "
        f"{found.checkpoints} checkpoints, {found.model_folders} model folders, fingerprint {found.fingerprint}"
    )
    return 0


def diff_command(arguments: argparse.Namespace) -> int:
    """Compare two recorded runs bit by bit; exit 1 at a difference."""
    from ppo_repro.runs.diff import first_difference

    return _report_difference(first_difference(arguments.a, arguments.b), arguments.json, "identical")


def _report_difference(difference: Difference | None, as_json: bool, identical: str) -> int:
    if as_json:
        found = None if difference is None else dataclasses.asdict(difference)
        print_json({"identical": difference is None, "first_difference": found})
    else:
        print(identical if difference is None else f"different: {difference.describe()}")
    return 0 if difference is None else 1


def show_command(arguments: argparse.Namespace) -> int:
    """Print what a recorded run did."""
    from ppo_repro.records import reader
    from ppo_repro.records.config_file import load_recorded_config
    from ppo_repro.runs.summary import iteration_lines, sample_lines, speeds, summarise, verdicts

    run_dir = arguments.run
    manifest = reader.open_manifest(run_dir, allow_incomplete=not arguments.json)
    if manifest.kind == "control":
        from ppo_repro.commands import control

        return control.show(run_dir, manifest, arguments.json)
    if arguments.json:
        print_json(dataclasses.asdict(summarise(run_dir)))
        return 0
    print(f"{run_dir}: {manifest.status}, {len(manifest.iterations)} iterations, fingerprint {manifest.fingerprint}")
    if manifest.iterations:
        print(iteration_lines(run_dir, 12).to_string(index=False, float_format=lambda x: f"{x:.4g}"))
        print("\n".join(sample_lines(run_dir, len(manifest.iterations) - 1, arguments.samples)))
    if manifest.status == "complete":
        summary = summarise(run_dir)
        config = load_recorded_config(run_dir)
        said = verdicts(summary, config.ppo.ratio_anchor, config.value.kind != "none")
        print("\n".join([*said, *speeds(summary)]))
    return 0


def probe_command(arguments: argparse.Namespace) -> int:
    """Check every invariance on this machine, with a negative control; exit 1 if one fails."""
    from ppo_repro.config.files import load_config

    config = load_config(arguments.config, arguments.set)
    from ppo_repro.checks.probe import failures, probe, render

    rows = probe(config)
    failed = failures(rows)
    if arguments.json:
        print_json({"rows": [dataclasses.asdict(row) for row in rows], "failures": failed})
    else:
        print(render(rows))
        print("\n".join(failed) or "every promise holds, and the control finds the differences it must find")
    return 1 if failed else 0


def bisect_command(arguments: argparse.Namespace) -> int:
    """Find the module and the condition at which sampler and trainer part."""
    from ppo_repro.checks.bisect import bisect, lines

    found = bisect(arguments.source, arguments.set, arguments.out)
    print_result(arguments.json, dataclasses.asdict(found), lines(found))
    # exact numerics promise that no op differs; native ones promise nothing
    return 1 if found.first_divergent_op["exact"] else 0


def dpo_command(arguments: argparse.Namespace) -> int:
    """Train by DPO on the responses of a recorded run, as a baseline."""
    from ppo_repro.config.files import load_dpo_config

    config = load_dpo_config(arguments.config, arguments.set)
    from ppo_repro.dpo.run import lines, train_dpo
    from ppo_repro.runs.progress import ConsoleProgress

    with ConsoleProgress() as watcher:
        result = train_dpo(config, arguments.out, watcher)
    print_result(arguments.json, dataclasses.asdict(result), lines(result))
    return 0


def plan_command(arguments: argparse.Namespace) -> int:
    """Work out how much memory a configuration needs, without loading a weight."""
    from ppo_repro.config.files import load_config

    config = load_config(arguments.config, arguments.set)
    from ppo_repro.plan.report import as_json, lines
    from ppo_repro.plan.shapes import plan_run

    plan = plan_run(config)
    print_result(arguments.json, as_json(plan), lines(plan))
    return 0


def grid_command(arguments: argparse.Namespace) -> int:
    """Run every cell of a grid file that is not complete; exit 1 if one is not complete at the end."""

    from ppo_repro.commands import grid

    return grid.run(arguments)


def report_command(arguments: argparse.Namespace) -> int:
    """Write one HTML page about a recorded run, or about the runs of a folder."""
    try:
        from analysis.report.build import write_report
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "analysis":
            raise
        raise UserError(
            "report: `analysis` is not installed; it comes with the checkout, not with the wheel: "
            "clone the repository and `pip install -e .` there"
        ) from error
    path, size = write_report(arguments.run, arguments.out, arguments.responses)
    print_result(arguments.json, {"report": str(path), "bytes": size}, [f"report      {path} ({size / 1e6:.2f} MB)"])
    return 0


def track_command(arguments: argparse.Namespace) -> int:
    """Copy a recorded run or grid into MLflow."""
    from ppo_repro.records.reader import open_manifest

    is_grid = (arguments.run / "grid.yaml").exists()
    if not is_grid:
        open_manifest(arguments.run, allow_incomplete=True)
    from ppo_repro.tracking.mlflow_copy import track, track_grid

    run_id = track_grid(arguments.run, arguments.uri) if is_grid else track(arguments.run, arguments.uri)
    line = f"MLflow run {run_id} in {arguments.uri}; look with: mlflow ui --backend-store-uri {arguments.uri}"
    print_result(arguments.json, {"run_id": run_id, "uri": arguments.uri}, [line])
    return 0
