"""Commands that compute a run. Heavy imports wait until a command runs: --help stays quick."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ppo_repro.base.clock import OTHER, Clock
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import MANIFEST
from ppo_repro.base.latest import RUNS
from ppo_repro.base.output import print_json, print_result, say, tell
from ppo_repro.commands.recorded import report_difference
from ppo_repro.records.run_state import how_to_go_on
from ppo_repro.tracking.follower import Copies, followed, targets_of

if TYPE_CHECKING:
    from ppo_repro.base.ranks import Ranks
    from ppo_repro.base.watcher import Watcher
    from ppo_repro.config.files import AnyConfig, Kind
    from ppo_repro.runs.fork_plan import Fork
    from ppo_repro.runs.kind import RunKind

Planned = TypeVar("Planned")
SIZES = (1, 2, 4, 8)  # numbers of processes whose sums are whole subtrees of a minibatch's sum


def processes() -> tuple[int, int]:
    """Return rank and number of processes as torchrun sets them, 0 and 1 without torchrun.

    Raises UserError for a number that is not in SIZES.
    """
    texts = [os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))]
    if not all(text.isdecimal() for text in texts):
        raise UserError(f"RANK, WORLD_SIZE = {', '.join(texts)}: must be counts, as torchrun sets them")
    rank, size = map(int, texts)
    if size <= 1:
        return 0, 1
    if size not in SIZES:
        raise UserError(f"torchrun --nproc-per-node: {size} processes were started; a run takes 1, 2, 4 or 8")
    if rank >= size:
        raise UserError(f"RANK, WORLD_SIZE = {rank}, {size}: the first must be smaller, as torchrun sets them")
    return rank, size


@contextmanager
def _working_together(plan: Callable[[], Planned]) -> Iterator[tuple[Ranks, Watcher, Planned]]:
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
def _resumable(begun: Path, ranks: Ranks) -> Iterator[None]:
    """Print how to resume the run `begun` if Ctrl-C ends this block."""
    try:
        yield
    except KeyboardInterrupt as error:
        if not ranks.is_first:
            raise
        kept = how_to_go_on(begun)
        raise type(error)(f"{error}; {kept}" if str(error) else kept) from error


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

    label, clock, copies = label_of(arguments.name, arguments.notes, arguments.tag), Clock(), Copies()
    targets = targets_of(arguments.track, arguments.tensorboard)
    plan = partial(_plan_run, arguments)
    with _working_together(plan) as (ranks, watcher, (kind, config, folder)), _resumable(folder, ranks):
        from ppo_repro.runs.run import run

        copying = followed(folder, copies, targets if ranks.is_first else ())
        run(_executed_by(kind, watcher, ranks), config, arguments.out, clock, copying, label)
        clock.lap("tracking" if targets else OTHER)
    if ranks.is_first:
        _report_run(folder, clock.with_total(), arguments.json, copies)
    return 0


def _plan_run(arguments: argparse.Namespace) -> tuple[Kind, AnyConfig, Path]:
    """Read and check the configuration of a new run; return its kind, the configuration and the run's folder."""
    from ppo_repro.config.files import load_any
    from ppo_repro.config.inputs import run_folder
    from ppo_repro.config.run import RunConfig

    kind, config = load_any(arguments.config, arguments.set)
    if arguments.unchecked:
        own = config.functions if isinstance(config, RunConfig) else {}
        if not own:
            raise UserError("--unchecked: this configuration has no function of your own; leave it out")
        kind, config = load_any(arguments.config, [*arguments.set, *(f"{f}.checked=false" for f in own)])
    folder = run_folder(config, arguments.out)
    say(f"{config.experiment}, seed {config.seed}: {config.iterations} iterations into {folder}")
    _require_startable(folder, config)
    return kind, config, folder


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
    targets, copies = targets_of(arguments.track, arguments.tensorboard), Copies()
    plan = partial(_kind_to_resume, arguments.run)
    with _working_together(plan) as (ranks, watcher, kind), _resumable(arguments.run, ranks):
        from ppo_repro.runs.resume import resume

        copying = followed(arguments.run, copies, targets if ranks.is_first else ())
        executed = _executed_by(kind, watcher, ranks)
        resumed = resume(executed, arguments.run, arguments.set, arguments.inputs, copying)
    if not ranks.is_first:
        return 0
    where = f"resumed from iteration {resumed.start}" if resumed.start else "computed again from the beginning"
    again = resumed.recorded - resumed.start
    say(where + (f"; {again} recorded iterations came out identical" if again else ""))
    _report_run(arguments.run, None, arguments.json, copies)
    return 0


def _kind_to_resume(run_dir: Path) -> Kind:
    from ppo_repro.base.lock import require_no_writer

    kind = _kind_of(run_dir)
    require_no_writer(run_dir)
    return kind


def fork_command(arguments: argparse.Namespace) -> int:
    """Start a new run from a checkpoint of a recorded one, with changed fields or another reward."""
    say(f"{arguments.run}: a new run from one of its checkpoints")
    from ppo_repro.records.label import label_of

    label, clock, copies = label_of(arguments.name, arguments.notes, arguments.tag), Clock(), Copies()
    targets = targets_of(arguments.track, arguments.tensorboard)
    with _working_together(partial(_plan_fork, arguments)) as (ranks, watcher, plan), _resumable(plan.folder, ranks):
        from ppo_repro.runs.fork import fork
        from ppo_repro.runs.language import LanguageKind

        copying = followed(plan.folder, copies, targets if ranks.is_first else ())
        fork(LanguageKind(watcher, ranks), plan, clock, copying, label)
        clock.lap("tracking" if targets else OTHER)
    if ranks.is_first:
        _report_run(plan.folder, clock.with_total(), arguments.json, copies)
    return 0


def _plan_fork(arguments: argparse.Namespace) -> Fork:
    """Plan a fork, and check what it would read and write."""
    from ppo_repro.runs.fork_plan import plan_fork

    plan = plan_fork(arguments.run, arguments.at, arguments.set, arguments.out, arguments.inputs)
    config, first = plan.config, plan.origin.iteration
    say(f"iterations {first} to {config.iterations - 1} of {config.iterations} into {plan.folder}")
    _require_startable(plan.folder, config)
    return plan


def _report_run(run_dir: Path, seconds: dict[str, float] | None, as_json: bool, copies: Copies) -> None:
    """Print the summary of a complete run; `seconds` by phase replace the recorded ones."""
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
    for option in ("set", "inputs", "iterations") if is_study else ("cells", "seed", "out", "workers"):
        if getattr(arguments, option) not in (None, []):
            raise UserError(f"--{option}: is for {'runs' if is_study else 'studies'}; leave it out")
    return _rerun_study(arguments) if is_study else _rerun(arguments)


def _rerun_study(arguments: argparse.Namespace) -> int:
    """Run some cells of a study again and compare them with its committed results."""
    cells, workers = arguments.cells or 1, arguments.workers or 1
    say(f"{arguments.run}: running {cells} of its cells again")
    if processes()[1] > 1:
        raise UserError("cells of a study work in one process each; start this without torchrun")
    from ppo_repro.grids import study

    found = study.reproduce(arguments.run, cells, arguments.seed or 0, arguments.out or RUNS, workers)
    verdict = found.difference or f"identical: {len(found.cells)} cells and the tables of {study.PAGE}"
    print_result(arguments.json, asdict(found), [*found.cells, f"records     {found.folder}", verdict])
    return 1 if found.difference else 0


def _kind_of(run_dir: Path) -> Kind:
    from ppo_repro.records.manifest import load_head

    return load_head(run_dir).kind


def _rerun(arguments: argparse.Namespace) -> int:
    """Execute a recorded run again and compare every buffer."""
    only: range | None = arguments.iterations
    what = "everything" if only is None else f"iterations {only.start} to {only.stop - 1}"
    say(f"{arguments.run}: computing {what} again, to compare every buffer")
    with _working_together(partial(_kind_of, arguments.run)) as (ranks, watcher, kind):
        from ppo_repro.runs.rerun import rerun

        executed = _executed_by(kind, watcher, ranks)
        report = rerun(executed, arguments.run, arguments.set, arguments.inputs, only)
    if not ranks.is_first:
        return 0 if report.difference is None else 1
    where = "" if only is None else f" from iteration {report.begun}, every number;"
    identical = f"identical: {report.iterations} iterations{where or ','} fingerprint {report.fingerprint}"
    if report.taken:
        identical += f"; the responses are the recorded ones, because {report.taken} promises no bits"
    return report_difference(report.difference, arguments.json, identical, {"recorded_responses": bool(report.taken)})
