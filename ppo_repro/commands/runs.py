"""Commands that compute a run. Heavy imports wait until a command runs: --help stays quick."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ppo_repro.base.clock import OTHER, Clock
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import MANIFEST
from ppo_repro.base.latest import RUNS
from ppo_repro.base.output import print_json, print_result, say, tell
from ppo_repro.base.processes import processes
from ppo_repro.commands.recorded import report_difference
from ppo_repro.records.next_command import how_to_go_on
from ppo_repro.tracking.follower import Copies, followed, targets_of

if TYPE_CHECKING:
    from ppo_repro.base.ranks import Ranks
    from ppo_repro.base.watcher import Watcher
    from ppo_repro.config.kinds import AnyConfig, Kind
    from ppo_repro.runs.fork_plan import Fork
    from ppo_repro.runs.kind import RunKind

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class _Planned(Generic[Subject]):
    """What the first process finds out before the slow import of torch."""

    kind: Kind
    folder: Path  # of the run
    subject: Subject  # the configuration of a new run, or the plan of a fork; None for a recorded run


@dataclass(frozen=True)
class _Recording(Generic[Subject]):
    """A run that a command computes and records."""

    planned: _Planned[Subject]
    kind: RunKind[Any, Any]
    clock: Clock  # since the command began
    tracking: AbstractContextManager[None]
    copies: Copies  # for trackers

    def report(self, as_json: bool, seconds: dict[str, float] | None) -> int:
        """Print the summary of the complete run in the first process, and return the exit code.

        `seconds` by phase replace the recorded ones.
        """
        if self.kind.ranks.is_first:
            _print_summary(self.planned.folder, as_json, seconds, self.copies)
        return 0


@contextmanager
def _recording(arguments: argparse.Namespace, plan: Callable[[], _Planned[Subject]]) -> Iterator[_Recording[Subject]]:
    """Plan a run, and yield what computes it; `run`, `resume` and `fork` do so in this block."""
    clock, copies = Clock(), Copies()
    targets = targets_of(arguments.track, arguments.tensorboard)
    with _working_together(plan) as (ranks, watcher, planned), _resumable(planned.folder, ranks):
        tracking = followed(planned.folder, copies, targets if ranks.is_first else ())
        yield _Recording(planned, _executed_by(planned.kind, watcher, ranks), clock, tracking, copies)
        clock.lap("tracking" if targets else OTHER)


@contextmanager
def _working_together(
    plan: Callable[[], _Planned[Subject]],
) -> Iterator[tuple[Ranks, Watcher, _Planned[Subject]]]:
    """Yield the processes of this command, the watcher that prints progress in the first process, and a plan.

    The first process alone makes the plan, because it alone has the files that the user names.
    """
    alone = plan() if processes()[1] == 1 else None  # mistakes are reported before the slow import of torch
    from ppo_repro.base.progress import ConsoleProgress
    from ppo_repro.base.ranks import joined
    from ppo_repro.base.watcher import Silent
    from ppo_repro.runs.environment import require_same_versions

    with joined(*processes()) as ranks:
        require_same_versions(ranks)
        ranks.require_same("command line", sys.argv[1:], UserError)
        planned = ranks.first(plan) if alone is None else alone
        if not ranks.is_first:
            yield ranks, Silent(), planned
            return
        with ConsoleProgress() as watcher:
            yield ranks, watcher, planned


@contextmanager
def _resumable(run_dir: Path, ranks: Ranks) -> Iterator[None]:
    """Print how to resume a run if Ctrl-C ends this block."""
    try:
        yield
    except KeyboardInterrupt as error:
        if not ranks.is_first:
            raise
        remedy = how_to_go_on(run_dir)
        raise type(error)(f"{error}; {remedy}" if str(error) else remedy) from error


def _executed_by(kind: Kind, watcher: Watcher, ranks: Ranks) -> RunKind[Any, Any]:
    """Return the RunKind that executes a configuration.

    Raises UserError for several processes if the kind works in one.
    """
    if kind == "language":
        from ppo_repro.runs.language import LanguageKind

        return LanguageKind(watcher, ranks)
    if kind == "dpo":
        from ppo_repro.runs.dpo import DPOKind

        return DPOKind(watcher, ranks)
    if ranks.size > 1:
        raise UserError("a control run works in one process; start this command without torchrun")
    from ppo_repro.runs.control import ControlKind  # needs gymnasium, an optional package

    return ControlKind(watcher)


def run_command(arguments: argparse.Namespace) -> int:
    """Run PPO on a language model or in Gymnasium, or DPO; record every buffer, print a summary."""
    from ppo_repro.records.label import label_of

    label = label_of(arguments.name, arguments.notes, arguments.tag)
    with _recording(arguments, partial(_plan_run, arguments)) as recording:
        from ppo_repro.runs.run import run

        config = recording.planned.subject
        run(recording.kind, config, arguments.out, recording.clock, recording.tracking, label)
    return recording.report(arguments.json, recording.clock.with_total())


def _plan_run(arguments: argparse.Namespace) -> _Planned[AnyConfig]:
    """Read and check the configuration of a new run."""
    from ppo_repro.config.files import load_any
    from ppo_repro.config.inputs import run_folder
    from ppo_repro.config.run import RunConfig

    kind, config = load_any(arguments.config, arguments.set)
    if arguments.unchecked:
        functions = config.functions if isinstance(config, RunConfig) else {}
        if not functions:
            raise UserError("--unchecked: this configuration has no function of your own; leave it out")
        unchecked = [f"{field}.checked=false" for field in functions]
        kind, config = load_any(arguments.config, [*arguments.set, *unchecked])
    folder = run_folder(config, arguments.out)
    say(f"{config.experiment}, seed {config.seed}: {config.iterations} iterations into {folder}")
    _require_startable(folder, config)
    return _Planned(kind, folder, config)


def _require_startable(folder: Path, config: AnyConfig) -> None:
    """Raise UserError if the folder of a new run is taken, or if the run could not use one of its files."""
    from ppo_repro.base.files import require_new
    from ppo_repro.base.lock import require_no_writer
    from ppo_repro.config.run import RunConfig
    from ppo_repro.runs.input_checks import require_inputs

    require_no_writer(folder)
    require_new(folder)
    if isinstance(config, RunConfig):
        require_inputs(config)


def resume_command(arguments: argparse.Namespace) -> int:
    """Continue a run that was killed, interrupted or failed; exit 1 if an iteration computed again differs."""
    say(f"{arguments.run}: going on after what is recorded")
    with _recording(arguments, partial(_plan_resume, arguments.run)) as recording:
        from ppo_repro.runs.resume import resume

        resumed = resume(recording.kind, arguments.run, arguments.set, arguments.inputs, recording.tracking)
    if recording.kind.ranks.is_first:
        where = f"resumed from iteration {resumed.start}" if resumed.start else "computed again from the beginning"
        again = resumed.recorded - resumed.start
        say(where + (f"; {again} recorded iterations came out identical" if again else ""))
    return recording.report(arguments.json, None)


def _plan_resume(run_dir: Path) -> _Planned[None]:
    """Find the kind of a recorded run that no other process writes."""
    from ppo_repro.base.lock import require_no_writer

    planned = _plan_recorded(run_dir)
    require_no_writer(run_dir)
    return planned


def _plan_recorded(run_dir: Path) -> _Planned[None]:
    """Find the kind of a recorded run."""
    from ppo_repro.records.manifest import load_head

    return _Planned(load_head(run_dir).kind, run_dir, None)


def fork_command(arguments: argparse.Namespace) -> int:
    """Start a new run from a checkpoint of a recorded one, with changed fields or another reward."""
    say(f"{arguments.run}: a new run from one of its checkpoints")
    from ppo_repro.records.label import label_of

    label = label_of(arguments.name, arguments.notes, arguments.tag)
    with _recording(arguments, partial(_plan_fork, arguments)) as recording:
        from ppo_repro.runs.fork import fork

        fork(recording.kind, recording.planned.subject, recording.clock, recording.tracking, label)
    return recording.report(arguments.json, recording.clock.with_total())


def _plan_fork(arguments: argparse.Namespace) -> _Planned[Fork]:
    """Plan a fork, and check what it would read and write."""
    from ppo_repro.config.kinds import LANGUAGE
    from ppo_repro.runs.fork_plan import plan_fork

    plan = plan_fork(arguments.run, arguments.at, arguments.set, arguments.out, arguments.inputs)
    config, first = plan.config, plan.origin.iteration
    say(f"iterations {first} to {config.iterations - 1} of {config.iterations} into {plan.folder}")
    _require_startable(plan.folder, config)
    return _Planned(LANGUAGE, plan.folder, plan)


def _print_summary(run_dir: Path, as_json: bool, seconds: dict[str, float] | None, copies: Copies) -> None:
    """Print the summary of a complete run, and where its records, policy and copies are."""
    from ppo_repro.runs.summary import summarise

    summary = summarise(run_dir, seconds)
    if as_json:
        print_json({**summary.figures, **copies.fields})
        return
    lines = [*summary.sentences, *summary.speeds, f"fingerprint {summary.figures['fingerprint']}"]
    lines.append(f"records     {run_dir}")
    policy = run_dir / "checkpoints" / "final"
    if policy.is_dir():
        lines.append(f"policy      {policy}")
    lines.append(f"again       ppo-repro rerun {shlex.quote(str(run_dir))}")
    tell("\n".join([*lines, *copies.lines]))


def rerun_command(arguments: argparse.Namespace) -> int:
    """Execute a recorded run again and compare every buffer, or cells of a study; exit 1 at a difference."""
    folder: Path = arguments.run.resolve()  # `.` has no name
    is_study = not (folder / MANIFEST).exists() and (folder / f"{folder.name}.yaml").is_file()
    of_other: list[argparse.Action] = arguments.of_run if is_study else arguments.of_study
    for option in of_other:
        if getattr(arguments, option.dest) != option.default:
            raise UserError(f"--{option.dest}: is for {'runs' if is_study else 'studies'}; leave it out")
    return _rerun_study(arguments) if is_study else _rerun(arguments)


def _rerun_study(arguments: argparse.Namespace) -> int:
    """Run some cells of a study again and compare them with its committed results."""
    cells, workers = arguments.cells or 1, arguments.workers or 1
    say(f"{arguments.run}: running {cells} of its cells again")
    if processes()[1] > 1:
        raise UserError("cells of a study work in one process each; start this without torchrun")
    from ppo_repro.grids import study

    again = study.reproduce(arguments.run, cells, arguments.seed or 0, arguments.out or RUNS, workers)
    verdict = again.difference or f"identical: {len(again.cells)} cells and the tables of {study.PAGE}"
    print_result(arguments.json, asdict(again), [*again.cells, f"records     {again.folder}", verdict])
    return 1 if again.difference else 0


def _rerun(arguments: argparse.Namespace) -> int:
    """Execute a recorded run again and compare every buffer."""
    only: range | None = arguments.iterations
    what = "everything" if only is None else f"iterations {only.start} to {only.stop - 1}"
    say(f"{arguments.run}: computing {what} again, to compare every buffer")
    with _working_together(partial(_plan_recorded, arguments.run)) as (ranks, watcher, planned):
        from ppo_repro.runs.rerun import rerun

        kind = _executed_by(planned.kind, watcher, ranks)
        report = rerun(kind, arguments.run, arguments.set, arguments.inputs, only)
    if not ranks.is_first:
        return 0 if report.difference is None else 1
    where = "" if only is None else f" from iteration {report.begun}, every number;"
    identical = f"identical: {report.iterations} iterations{where or ','} fingerprint {report.fingerprint}"
    if report.taken:
        identical += f"; the responses are the recorded ones, because {report.taken} promises no bits"
    return report_difference(report.difference, arguments.json, identical, {"recorded_responses": bool(report.taken)})
