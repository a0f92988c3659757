"""Run a configuration from an empty folder to the final results."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from ppo_repro.base import interrupts
from ppo_repro.base.clock import Clock, as_text
from ppo_repro.base.errors import FunctionFailed, UserError
from ppo_repro.base.files import SUMS_NAME, file_digest, remove_folder
from ppo_repro.base.lock import only_writer
from ppo_repro.base.ranks import Ranks
from ppo_repro.config.inputs import gather, run_digest, run_folder
from ppo_repro.records import manifest, writer
from ppo_repro.records.folder import STARTED, UNEQUAL
from ppo_repro.records.label import UNLABELLED, Label, write_label
from ppo_repro.records.next_command import how_to_repair
from ppo_repro.records.writer import RunWriter
from ppo_repro.runs.environment import describe_code, describe_environment
from ppo_repro.runs.execute import execute, work_along
from ppo_repro.runs.kind import Config, Item, RunKind
from ppo_repro.runs.machine_memory import require_memory
from ppo_repro.runs.machines import files_of, on_every_machine
from ppo_repro.runs.starting_point import Start
from ppo_repro.stages.equal_bits import UnequalBits

OUR_FILES = ("task.chat_template", "task.dataset")  # fields whose functions are of this package
NO_TRACKING: AbstractContextManager[object] = nullcontext()


def run(
    kind: RunKind[Config, Item],
    config: Config,
    out: Path,
    clock: Clock | None = None,
    tracking: AbstractContextManager[object] = NO_TRACKING,
    label: Label = UNLABELLED,
) -> tuple[Path, dict[str, float]]:
    """Execute a configuration and record everything. A run that fails midway keeps its complete iterations.

    If there are several processes, the first one records. All others get copies of the files that the run reads.

    Args:
        clock: a running clock, whose phases count too.
        tracking: copies the run to trackers; this context is open while this process has the run's lock.

    Returns:
        The run folder, and wall seconds by phase and in total.

    Raises:
        UserError: names what the user has to correct.
    """
    clock, ranks = clock or Clock(), kind.ranks
    with on_every_machine(ranks, config, partial(files_of, config.model_dump(mode="json"))) as (config, _):
        require_memory(config, ranks.size, ranks.rank)
        clock.lap("start")
        run_dir = run_folder(config, out)
        with writing(ranks, run_dir), tracking:
            compute_new(kind, config, run_dir, clock, label)
    return run_dir, clock.with_total()


def writing(ranks: Ranks, run_dir: Path) -> AbstractContextManager[None]:
    """Lock a run folder. The first of several processes holds the lock. Raises UserError if another process has it."""
    return only_writer(run_dir) if ranks.is_first else nullcontext()


@dataclass(frozen=True)
class Inherited:
    """What a fork has from its origin."""

    start: Start
    fingerprint: str  # of the origin's records up to `start`
    take_over: Callable[[Path], int]  # puts these records into the fork's folder, and returns the number of iterations


def compute_new(
    kind: RunKind[Config, Item],
    config: Config,
    run_dir: Path,
    clock: Clock,
    label: Label,
    inherited: Inherited | None = None,
) -> None:
    """Make the folder of a new run, whose lock the caller has; execute and record the run in the first process.

    Raises PromiseBroken, naming the process, if its configuration or input files differ.
    """
    ranks, inputs = kind.ranks, gather(config)
    start, origin = (None, "") if inherited is None else (inherited.start, inherited.fingerprint)
    clock.lap("inputs")
    ranks.require_same("input files", sorted(inputs.digests.values()))
    if not ranks.is_first:
        work_along(kind, config, start)
        return
    environment = {**describe_environment(config, ranks.size, describe_code()), STARTED: as_text(clock.started)}
    temporary = writer.lay_out_run(run_dir, inputs, environment, run_digest(inputs, origin), kind.name)
    with _new_run(temporary, run_dir, label, inherited):
        clock.lap("records")
        execute(kind, config, run_dir, start, clock)


@contextmanager
def _new_run(temporary: Path, run_dir: Path, label: Label, inherited: Inherited | None) -> Iterator[None]:
    """Complete the folder of a new run, label it and rename it to `run_dir`.

    An exception such as Ctrl-C may come at any moment: it never leaves a folder whose status is "running". A run
    without a complete iteration of its own is removed, unless unequal bits ended it, which the user may want to
    examine.
    """
    inherited_iterations = 0
    try:
        write_label(temporary, label)
        if inherited is not None:
            inherited_iterations = inherited.take_over(temporary)
        writer.publish_run(temporary, run_dir)
        yield
    except BaseException as error:
        if temporary.exists():  # the run ended before this folder was renamed
            shutil.rmtree(temporary, ignore_errors=True)
        elif manifest.load_head(run_dir).num_iterations > inherited_iterations or isinstance(error, UnequalBits):
            end_by_error(run_dir, error)
        else:
            remove_folder(run_dir)
        raise


def end_by_error(run_dir: Path, error: BaseException) -> NoReturn:
    """Write into the manifest that `error` ended the run, and raise it again.

    If a function of the user failed, the message also says what to do.
    """
    _mark_ended(run_dir, error)
    if isinstance(error, FunctionFailed) and error.field not in OUR_FILES:
        raise FunctionFailed(f"{error}; {how_to_repair(run_dir, error.field)}", error.field) from error
    raise error


def _mark_ended(run_dir: Path, error: BaseException) -> None:
    """Write into the manifest that `error` ended the run, and which files of unequal bits were saved.

    If writing fails, the manifest still says "running", and the caller reports `error`. Records never change.
    """
    interrupts.ending()  # ignores further signals, because launchers repeat them
    with suppress(UserError, OSError):
        # read the manifest again: the error may have come after it was written and before our copy was updated
        ended = RunWriter(run_dir)
        if ended.head.status != "complete":
            sums = run_dir / UNEQUAL / SUMS_NAME
            if sums.exists():
                ended.list_files({**ended.head.files, sums.relative_to(run_dir).as_posix(): file_digest(sums)})
            ended.mark("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
