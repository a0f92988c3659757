"""What each command does. Heavy imports wait until a command needs them, so that --help is quick."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_repro.clock import OTHER, Clock
from ppo_repro.commands.first_look import check_files, overrides
from ppo_repro.commands.memory import within_memory, within_recorded
from ppo_repro.commands.recorded import report_difference
from ppo_repro.commands.run_folders import MANIFEST, how_to_go_on
from ppo_repro.errors import UserError
from ppo_repro.output import print_json, say, tell
from ppo_repro.tracking.follower import require_tensorboard

if TYPE_CHECKING:
    from ppo_repro.config.control import ControlConfig
    from ppo_repro.config.dpo import DPOConfig
    from ppo_repro.config.files import Kind
    from ppo_repro.config.run import RunConfig
    from ppo_repro.ranks import Ranks
    from ppo_repro.tracking.follower import Copies
    from ppo_repro.watcher import Watcher

SIZES = (1, 2, 4, 8)  # numbers of processes whose sums are whole subtrees of a minibatch's sum


def processes() -> tuple[int, int]:
    """(rank, number of processes) as torchrun sets them; (0, 1) without it. UserError for a number not in SIZES."""
    counts = {}
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")):
        text = os.environ.get(name, default)
        if not text.isdecimal():
            raise UserError(f"environment variable {name} = {text!r}: must be a count, as torchrun sets it")
        counts[name] = int(text)
    rank, size = counts["RANK"], counts["WORLD_SIZE"]
    if size <= 1:
        return 0, 1
    if size not in SIZES:
        raise UserError(f"torchrun --nproc-per-node: {size} processes were started; a run takes 1, 2, 4 or 8")
    if rank >= size:
        raise UserError(f"environment variable RANK = {rank}: must be below WORLD_SIZE = {size}, as torchrun sets it")
    return rank, size


@contextmanager
def _working_together() -> Iterator[tuple[Ranks, Watcher]]:
    """The processes of this command; the first one shows progress, the others are silent."""
    from ppo_repro.commands.progress import ConsoleProgress
    from ppo_repro.ranks import joined
    from ppo_repro.watcher import Silent

    with joined(*processes()) as ranks:
        if not ranks.is_first:
            yield ranks, Silent()
            return
        with ConsoleProgress() as watcher:
            yield ranks, watcher


@contextmanager
def _saying_how_to_go_on(run_dir: Path) -> Iterator[None]:
    """Add to Ctrl-C, SIGTERM and RankLost what `resume` will do."""
    try:
        yield
    except KeyboardInterrupt as error:
        kept = how_to_go_on(run_dir, f"`ppo-repro resume {run_dir}`")
        raise type(error)(f"{error}; {kept}" if str(error) else kept) from error


def run_command(arguments: argparse.Namespace) -> int:
    """Run PPO, record every buffer, print a summary."""
    from ppo_repro.config.files import load_config, read_tree
    from ppo_repro.config.mistakes import command_of

    set_fields = overrides(arguments)
    require_tensorboard(arguments.tensorboard)
    clock = Clock()
    other = command_of(read_tree(arguments.config, set_fields))
    if other in ("control", "dpo"):
        return control_command(arguments) if other == "control" else dpo_command(arguments)
    config = load_config(arguments.config, set_fields)
    folder = _begin(config, arguments.out)
    check_files(config)
    with _saying_how_to_go_on(folder), _working_together() as (ranks, watcher):
        from ppo_repro.runs.language import LanguageKind
        from ppo_repro.runs.run import run
        from ppo_repro.tracking.follower import followed

        uri, events = (arguments.track, arguments.tensorboard) if ranks.is_first else (None, None)
        with within_memory(config, ranks.size), followed(folder, uri, events) as copies:
            clock.lap("start")
            run_dir, _ = run(LanguageKind(watcher, ranks), config, arguments.out, clock)
        clock.lap("tracking" if arguments.track or arguments.tensorboard else OTHER)
    if ranks.is_first:
        _report_run(run_dir, clock.with_total(), arguments.json, copies)
    return 0


def _begin(config: RunConfig | ControlConfig | DPOConfig, out: Path) -> Path:
    """The folder of a run that is about to begin, which is said; UserError if the run exists."""
    from ppo_repro.config.inputs import run_folder
    from ppo_repro.files import require_new

    folder = run_folder(config, out)
    say(f"{config.experiment}, seed {config.seed}: {config.iterations} iterations into {folder}")
    require_new(folder, MANIFEST)
    return folder


def control_command(arguments: argparse.Namespace) -> int:
    """Run PPO on a Gymnasium environment, record every buffer, print a summary."""
    from ppo_repro.config.files import CONTROL, load_control_config

    return _run_alone(arguments, load_control_config(arguments.config, overrides(arguments)), CONTROL)


def dpo_command(arguments: argparse.Namespace) -> int:
    """Train by DPO on preference pairs, of a recorded run or of a file."""
    from ppo_repro.config.files import DPO, load_dpo_config

    return _run_alone(arguments, load_dpo_config(arguments.config, overrides(arguments)), DPO)


def _run_alone(arguments: argparse.Namespace, config: ControlConfig | DPOConfig, kind: Kind) -> int:
    """A run of a kind that works in one process."""
    require_tensorboard(arguments.tensorboard)
    folder = _begin(config, arguments.out)
    from ppo_repro.commands.kinds import RecordedKind
    from ppo_repro.commands.progress import ConsoleProgress
    from ppo_repro.ranks import ALONE
    from ppo_repro.runs.run import run
    from ppo_repro.tracking.follower import followed

    copied = followed(folder, arguments.track, arguments.tensorboard)
    with _saying_how_to_go_on(folder), ConsoleProgress() as watcher, copied as copies:
        run_dir, seconds = run(RecordedKind(kind).executed_by(watcher, ALONE), config, arguments.out)
    _report_run(run_dir, seconds, arguments.json, copies=copies)
    return 0


def resume_command(arguments: argparse.Namespace) -> int:
    """Continue a run that was killed, interrupted or failed; exit 1 if what it computes again differs."""
    say(f"{arguments.run}: going on after what is recorded")
    from ppo_repro.commands.kinds import kind_of

    kind = kind_of(arguments.run)  # what is no run is said before the seconds that torch takes
    with _saying_how_to_go_on(arguments.run), _working_together() as (ranks, watcher):
        from ppo_repro.runs.resume import resume

        with within_recorded(arguments.run, arguments.set, ranks.size):
            resumed = resume(kind.executed_by(watcher, ranks), arguments.run, arguments.set, arguments.inputs)
    if not ranks.is_first:
        return 0
    where = f"resumed after iteration {resumed.start}" if resumed.start else "computed again from the beginning"
    say(f"{where}; {resumed.recorded - resumed.start} recorded iterations came out identical")
    _report_run(arguments.run, None, arguments.json)
    return 0


def fork_command(arguments: argparse.Namespace) -> int:
    """Start a new run from a checkpoint of a recorded one, with changed fields or another reward."""
    say(f"{arguments.run}: a new run from one of its checkpoints")
    from ppo_repro.files import require_new
    from ppo_repro.records.fork import plan_fork

    clock = Clock()
    plan = plan_fork(arguments.run, arguments.at, arguments.set, arguments.out, arguments.inputs)
    config, origin = plan.config, plan.origin
    check_files(config)
    say(f"iterations {origin.iteration} to {config.iterations - 1} of {config.iterations} into {plan.folder}")
    require_new(plan.folder, MANIFEST)
    with _saying_how_to_go_on(plan.folder), _working_together() as (ranks, watcher):
        from ppo_repro.runs.fork import fork
        from ppo_repro.runs.language import LanguageKind

        with within_memory(config, ranks.size):
            clock.lap("start")
            seconds = fork(LanguageKind(watcher, ranks), plan, clock)
    if ranks.is_first:
        _report_run(plan.folder, seconds, arguments.json)
    return 0


def _report_run(
    run_dir: Path,
    seconds: dict[str, float] | None,
    as_json: bool,
    copies: Copies | None = None,
) -> None:
    """Print what a complete run did; `seconds` by phase where they are known better than from the records."""
    from ppo_repro.commands.kinds import kind_of
    from ppo_repro.runs.summary import speeds

    kind = kind_of(run_dir).summary
    summary = kind.summarise(run_dir, seconds)
    if as_json:
        print_json({**dataclasses.asdict(summary), **(copies.fields if copies else {})})
        return
    tell("\n".join([*kind.verdicts(summary), *speeds(summary, kind.unit)]))
    tell(f"fingerprint {summary.fingerprint}")
    tell(f"records     {run_dir}")
    policy = run_dir / "checkpoints" / "final"
    if policy.is_dir():
        tell(f"policy      {policy}")
    tell(f"again       ppo-repro rerun {run_dir}")
    for line in copies.lines if copies else ():
        tell(line)


def rerun_command(arguments: argparse.Namespace) -> int:
    """Execute a recorded run again and compare every buffer; exit 1 at a difference."""
    say(f"{arguments.run}: computing everything again, to compare every buffer")
    from ppo_repro.commands.kinds import kind_of

    kind = kind_of(arguments.run)
    with _working_together() as (ranks, watcher):
        from ppo_repro.runs.rerun import rerun

        with within_recorded(arguments.run, arguments.set, ranks.size):
            report = rerun(kind.executed_by(watcher, ranks), arguments.run, arguments.set, arguments.inputs)
    if not ranks.is_first:
        return 0 if report.difference is None else 1
    identical = f"identical: {report.iterations} iterations, fingerprint {report.fingerprint}"
    return report_difference(report.difference, arguments.json, identical)


def grid_command(arguments: argparse.Namespace) -> int:
    """Run every cell of a grid file that is not complete; exit 1 if one is not complete at the end."""
    say(f"{arguments.grid}: running what is missing of it in {arguments.out}")
    from ppo_repro.commands import grid

    return grid.run(arguments)


def reproduce_command(arguments: argparse.Namespace) -> int:
    """Run some cells of a study again and compare them with its committed results; exit 1 at a difference."""
    say(f"{arguments.study}: running {arguments.cells} of its cells again")
    from ppo_repro.commands import grid

    return grid.reproduce(arguments)
