"""What each command does. Heavy imports wait until a command needs them, so that --help is quick."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_repro.clock import OTHER, Clock
from ppo_repro.commands.memory import within_memory, within_recorded
from ppo_repro.errors import RankLost, UserError
from ppo_repro.output import print_json, print_result, say, tell
from ppo_repro.secrets import masked

if TYPE_CHECKING:
    from ppo_repro.ranks import Ranks
    from ppo_repro.runs.diff import Difference
    from ppo_repro.watcher import Watcher


def _environment_count(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    hint = ", as torchrun sets it" if name in ("WORLD_SIZE", "RANK") else " of seconds"
    if not text.isdecimal():
        raise UserError(f"environment variable {name} = {text!r}: must be a count{hint}")
    return int(text)


def processes() -> tuple[int, int]:
    """(rank, number of processes) as torchrun sets them; (0, 1) without it."""
    size = _environment_count("WORLD_SIZE", 1)
    return (_environment_count("RANK", 0), size) if size > 1 else (0, 1)


@contextmanager
def _working_together() -> Iterator[tuple[Ranks, Watcher]]:
    """The processes of this command; the first one shows progress, the others are silent."""
    from ppo_repro.commands.progress import ConsoleProgress
    from ppo_repro.heartbeats import PATIENCE_NAME, PATIENCE_SECONDS
    from ppo_repro.ranks import joined
    from ppo_repro.watcher import Silent

    patience = _environment_count(PATIENCE_NAME, PATIENCE_SECONDS)
    if patience < 1:
        raise UserError(f"environment variable {PATIENCE_NAME} = 0: must be at least 1 second")
    with joined(*processes(), patience) as ranks:
        if not ranks.is_first:
            yield ranks, Silent()
            return
        with ConsoleProgress() as watcher:
            yield ranks, watcher


@contextmanager
def _saying_how_to_go_on(folder: Sequence[Path]) -> Iterator[None]:
    """Add to RankLost what is kept in `folder`, the run folder where it is known by then."""
    try:
        yield
    except RankLost as error:
        if any((run_dir / "manifest.json").exists() for run_dir in folder):
            kept = f"complete iterations are kept; go on with `ppo-repro resume {folder[0]}`, in one process"
        else:
            kept = "nothing was recorded; start it again"
        raise RankLost(f"{error}; {kept}") from error


def run_command(arguments: argparse.Namespace) -> int:
    """Run PPO, record every buffer, print a summary."""
    from ppo_repro.config.files import load_config

    clock, folder = Clock(), list[Path]()
    with _saying_how_to_go_on(folder), _working_together() as (ranks, watcher):
        config = load_config(arguments.config, arguments.set)
        from ppo_repro.runs.language import LanguageKind
        from ppo_repro.runs.run import run, run_folder
        from ppo_repro.tracking.follower import followed

        folder.append(run_folder(config, arguments.out))
        watched = followed(folder[0], arguments.track if ranks.is_first else None)
        with within_memory(config, ranks.size), watched:
            clock.lap("start")
            run_dir, _ = run(LanguageKind(watcher, ranks, arguments.profile), config, arguments.out, clock)
        clock.lap("tracking" if arguments.track else OTHER)
    if ranks.is_first:
        _report_run(run_dir, clock.with_total(), arguments.json, arguments.profile)
    return 0


def control_command(arguments: argparse.Namespace) -> int:
    """Run PPO on a Gymnasium environment, record every buffer, print a summary."""
    from ppo_repro.config.control import load_control_config

    config = load_control_config(arguments.config, arguments.set)
    from ppo_repro.commands.progress import ConsoleProgress
    from ppo_repro.control.kind import ControlKind  # gymnasium, which not everybody has
    from ppo_repro.runs.run import run

    with ConsoleProgress() as watcher:
        run_dir, seconds = run(ControlKind(watcher), config, arguments.out)
    _report_run(run_dir, seconds, arguments.json)
    return 0


def resume_command(arguments: argparse.Namespace) -> int:
    """Continue a run that was killed, interrupted or failed; exit 1 if what it computes again differs."""
    from ppo_repro.commands.kinds import kind_of

    kind = kind_of(arguments.run)
    from ppo_repro.commands.progress import ConsoleProgress
    from ppo_repro.ranks import ALONE
    from ppo_repro.runs.run import resume

    with ConsoleProgress() as watcher, within_recorded(arguments.run, arguments.set):
        resumed = resume(kind.executed_by(watcher, ALONE), arguments.run, arguments.set)
    where = f"resumed after iteration {resumed.start}" if resumed.start else "computed again from the beginning"
    say(f"{where}; {resumed.recorded - resumed.start} recorded iterations came out identical")
    _report_run(arguments.run, None, arguments.json)
    return 0


def _report_run(run_dir: Path, seconds: dict[str, float] | None, as_json: bool, with_profile: bool = False) -> None:
    """Print what a complete run did; `seconds` by phase where they are known better than from the records."""
    from ppo_repro.commands.kinds import kind_of
    from ppo_repro.runs.summary import profile, profile_lines, speeds

    kind = kind_of(run_dir).summary
    summary = kind.summarise(run_dir, seconds)
    if as_json:
        profiled = {"profile": dataclasses.asdict(profile(run_dir))} if with_profile else {}
        print_json({**dataclasses.asdict(summary), **profiled})
        return
    measured = profile_lines(profile(run_dir)) if with_profile else []
    tell("\n".join([*kind.verdicts(summary), *speeds(summary, kind.unit), *measured]))
    tell(f"fingerprint {summary.fingerprint}")
    tell(f"records     {run_dir}")
    policy = run_dir / "checkpoints" / "final"
    if policy.is_dir():
        tell(f"policy      {policy}")
    tell(f"again       ppo-repro rerun {run_dir}")


def rerun_command(arguments: argparse.Namespace) -> int:
    """Execute a recorded run again and compare every buffer; exit 1 at a difference."""
    from ppo_repro.commands.kinds import kind_of

    with _saying_how_to_go_on([]), _working_together() as (ranks, watcher):
        kind = kind_of(arguments.run)
        from ppo_repro.runs.run import rerun

        with within_recorded(arguments.run, arguments.set, ranks.size):
            report = rerun(kind.executed_by(watcher, ranks), arguments.run, arguments.set)
    if not ranks.is_first:
        return 0 if report.difference is None else 1
    identical = f"identical: {report.iterations} iterations, fingerprint {report.fingerprint}"
    return _report_difference(report.difference, arguments.json, identical)


def diff_command(arguments: argparse.Namespace) -> int:
    """Compare two recorded runs bit by bit; exit 1 at a difference."""
    from ppo_repro.runs.diff import first_difference

    return _report_difference(first_difference(arguments.a, arguments.b), arguments.json, "identical")


def _report_difference(difference: Difference | None, as_json: bool, identical: str) -> int:
    fields = None if difference is None else dataclasses.asdict(difference)
    line = identical if difference is None else f"different: {difference.describe()}"
    print_result(as_json, {"identical": difference is None, "first_difference": fields}, [line])
    return 0 if difference is None else 1


def probe_command(arguments: argparse.Namespace) -> int:
    """Check every invariance on this machine, with a negative control; exit 1 if one fails."""
    from ppo_repro.config.files import load_config

    config = load_config(arguments.config, arguments.set)
    from ppo_repro.checks.probe import failures, probe, render
    from ppo_repro.records.accuracy import sentence

    found = probe(config)
    failed, accuracy = failures(found.rows), found.accuracy
    if accuracy is not None and accuracy.is_low:
        say(f"warning: {sentence(accuracy)}")
    if arguments.json:
        print_json({**dataclasses.asdict(found), "failures": failed})
    else:
        tell(render(found.rows))
        if accuracy is not None:
            tell(sentence(accuracy))
        tell("\n".join(failed) or "every promise holds, and the control finds the differences it must find")
    return 1 if failed else 0


def bisect_command(arguments: argparse.Namespace) -> int:
    """Find the module and the condition from which sampler and trainer differ."""
    from ppo_repro.checks.bisect import bisect, lines

    bisection = bisect(arguments.source, arguments.set, arguments.out)
    print_result(arguments.json, dataclasses.asdict(bisection), lines(bisection))
    # exact numerics promise that no op differs; native ones promise nothing
    return 1 if bisection.first_divergent_op["exact"] else 0


def dpo_command(arguments: argparse.Namespace) -> int:
    """Train by DPO on the responses of a recorded run, as a baseline."""
    from ppo_repro.config.files import load_dpo_config

    config = load_dpo_config(arguments.config, arguments.set)
    from ppo_repro.commands.progress import ConsoleProgress
    from ppo_repro.dpo.run import lines, train_dpo

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
    from importlib import import_module
    from importlib.util import find_spec

    # the wheel has it below the package, a checkout beside it
    home = next((name for name in ("ppo_repro.analysis", "analysis") if find_spec(name)), None)
    if home is None:
        raise UserError("report: `analysis` is not beside this package; install the wheel, or a checkout")
    write_report = import_module(f"{home}.report.build").write_report
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
    print_result(arguments.json, {"run_id": run_id, "uri": masked(arguments.uri)}, [line])
    return 0
