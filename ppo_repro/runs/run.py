"""Run from the first iteration to the last: compute, record, save models."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ppo_repro.base import interrupts
from ppo_repro.base.clock import OTHER, Clock, as_text
from ppo_repro.base.errors import FunctionFailed, PromiseBroken, UserError
from ppo_repro.base.files import SUMS_NAME, file_digest, remove_folder, whole_folder, write_sums
from ppo_repro.base.lock import only_writer
from ppo_repro.base.ranks import Ranks
from ppo_repro.config.inputs import Inputs, gather, run_digest, run_folder
from ppo_repro.records import manifest, writer
from ppo_repro.records.diff import Difference, from_recorded
from ppo_repro.records.folder import STARTED, TIMES_NAME, UNEQUAL, UNEQUAL_TOKENS
from ppo_repro.records.label import UNLABELLED, Label, write_label
from ppo_repro.records.listing import how_to_repair
from ppo_repro.records.manifest import Manifest
from ppo_repro.records.writer import RunWriter
from ppo_repro.runs.checkpoints import require_room
from ppo_repro.runs.environment import describe_environment
from ppo_repro.runs.kind import Config, Execution, Item, RunKind, Tables
from ppo_repro.runs.machine_memory import require_memory
from ppo_repro.runs.machines import files_of, on_every_machine
from ppo_repro.runs.start import Start
from ppo_repro.stages.agreement import UnequalBits

OUR_FILES = ("task.chat_template", "task.dataset")  # fields whose functions are of this package
NOTHING: AbstractContextManager[object] = nullcontext()


def run(
    kind: RunKind[Config, Item],
    config: Config,
    out: Path,
    clock: Clock | None = None,
    beside: AbstractContextManager[object] = NOTHING,
    label: Label = UNLABELLED,
) -> tuple[Path, dict[str, float]]:
    """Execute a configuration and record everything; a run that fails midway keeps its complete iterations.

    If there are several processes, the first one records; the others get copies of the files that the run reads.

    Args:
        clock: a running clock, whose phases count too.
        beside: a context that is open while this process has the run's lock.

    Returns:
        The run folder, and wall seconds by phase and in total.

    Raises:
        UserError: names what the user has to correct.
    """
    clock, ranks = clock or Clock(), kind.ranks
    with on_every_machine(ranks, config, partial(files_of, config.model_dump(mode="json"))) as (config, _):
        require_memory(config, ranks.size, ranks.rank)
        clock.lap("start")
        inputs, run_dir = gather(config), run_folder(config, out)
        with writing(ranks, run_dir), beside:
            compute_new(kind, config, run_dir, inputs, run_digest(inputs), clock, label)
    return run_dir, clock.with_total()


def writing(ranks: Ranks, run_dir: Path) -> AbstractContextManager[None]:
    """Lock a run folder; the first of several processes holds the lock. Raises UserError if another process has it."""
    return only_writer(run_dir) if ranks.is_first else nullcontext()


def compute_new(
    kind: RunKind[Config, Item],
    config: Config,
    run_dir: Path,
    inputs: Inputs,
    digest: str,
    clock: Clock,
    label: Label,
    start: Start | None = None,
    fill: Callable[[Path], int] = lambda folder: 0,
) -> None:
    """Make the folder of a new run, execute the run and record it; only the first process records.

    Args:
        run_dir: its folder, whose lock the caller has.
        start: a checkpoint from which the run continues.
        fill: puts records of earlier iterations into the folder and returns their number.

    Raises:
        PromiseBroken: names the process whose configuration or input files differ.
    """
    ranks = kind.ranks
    opened = kind.open(config, run_dir if ranks.is_first else None, start)
    clock.lap("inputs")
    ranks.require_same("input files", sorted(inputs.digests.values()))
    if not ranks.is_first:
        work_along(opened)
        return
    environment = {**describe_environment(config, ranks.size), STARTED: as_text(clock.started)}
    temporary = writer.lay_out_run(run_dir, inputs, environment, digest, kind.name)
    with _new_run(temporary, run_dir, label, fill):
        clock.lap("records")
        execute(kind, config, run_dir, opened, clock)


def work_along(opened: AbstractContextManager[Execution[Item]]) -> None:
    """Compute a run without recording it; every process except the first one does this."""
    with opened as execution:
        kept = execution.checkpoints
        for item in execution.iterations():
            if kept is not None and kept.is_due(item.index + 1):
                kept.give_moments()
        execution.ending(Clock())
        if kept is not None and kept.keeps_final_state:
            kept.give_moments()


@contextmanager
def _new_run(temporary: Path, run_dir: Path, label: Label, fill: Callable[[Path], int]) -> Iterator[None]:
    """Fill the folder of a new run, label it and rename it to `run_dir`.

    An exception such as Ctrl-C may come at any moment: it never leaves a folder whose status is "running". A run
    without a complete iteration of its own is removed, unless unequal bits ended it, which the user may want to
    examine.
    """
    begun = 0
    try:
        write_label(temporary, label)
        begun = fill(temporary)
        writer.publish_run(temporary, run_dir)
        yield
    except BaseException as error:
        if temporary.exists():  # it has not been renamed yet
            shutil.rmtree(temporary, ignore_errors=True)
        elif manifest.load_head(run_dir).num_iterations > begun or isinstance(error, UnequalBits):
            mark_ended(run_dir, error)
            raise_with_repair(run_dir, error)
        else:
            remove_folder(run_dir)
        raise


def mark_ended(run_dir: Path, error: BaseException) -> None:
    """Write into the manifest that `error` ended the run, and which files of unequal bits were saved.

    If writing fails, the manifest still says "running", and the caller reports `error`. Records never change.
    """
    interrupts.ending()  # launchers send a signal again and again
    with suppress(UserError, OSError):
        # from the disk: the error may have come after the file was written and before our copy was updated
        ended = RunWriter(run_dir)
        if ended.head.status != "complete":
            sums = run_dir / UNEQUAL / SUMS_NAME
            if sums.exists():
                ended.list_files({**ended.head.files, sums.relative_to(run_dir).as_posix(): file_digest(sums)})
            ended.mark("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")


def raise_with_repair(run_dir: Path, error: BaseException) -> None:
    """Raise `error` again; if a function of the user failed, the message also says what to do."""
    if isinstance(error, FunctionFailed) and error.field not in OUR_FILES:
        raise FunctionFailed(f"{error}; {how_to_repair(run_dir, error.field)}", error.field) from error


def execute(
    kind: RunKind[Config, Item],
    config: Config,
    run_dir: Path,
    opened: AbstractContextManager[Execution[Item]],
    clock: Clock,
) -> None:
    """Record an execution in its run folder until it is complete; `clock` assigns every second to a phase.

    Raises:
        PromiseBroken: an iteration that is already recorded differs when it is computed again; names the first cell.
        UnequalBits: an iteration breaks a promise of deterministic numerics; it is not recorded.
        UserError: the disk lacks room for the run's models and checkpoints.
    """
    recorded, written, computed = manifest.load(run_dir), RunWriter(run_dir), 0
    # where an error ends the block, the thread writes what it has begun
    with opened as execution, ThreadPoolExecutor(1, "records") as thread, _keeping_unequal(run_dir, execution):
        require_room(run_dir, execution.bytes_to_keep())
        _begin(recorded, written, execution)
        kept = execution.checkpoints
        clock.lap("preparation")
        beside = _RecordingBeside(recorded, written, thread)
        for item in execution.iterations():
            clock.divide(item.seconds)
            computed, done, seconds = computed + 1, item.index + 1, sum(item.seconds.values())
            tell = partial(kind.watcher.iteration, done, config.iterations, execution.progress(item), seconds)
            beside.record(item.index, execution.tables(item), tell)
            is_due = kept is not None and kept.is_due(done)
            if kept is not None and is_due:
                link = beside.link(item.index)
                clock.lap("records")
                written.keep_only(kept.save(run_dir, written.head, link))
                clock.lap("checkpoints")
            if computed == 1 or is_due:  # the first iteration says how long the others may take
                beside.settle()
            clock.lap("records")
        clock.lap(OTHER)
        beside.settle()
        clock.lap("records")
        results, side_tables = execution.ending(clock)
        clock.lap(OTHER)
        models = execution.keep_models(run_dir, written.head.fingerprint)
        written.list_files({**written.head.files, **models})
        clock.lap("models")
    clock.lap("closing")
    for name, tree in execution.closing_notes().items():
        written.note(name, tree)
    written.note(TIMES_NAME, {"iterations": computed, "seconds": clock.seconds})
    written.finish(results, side_tables)
    clock.lap("records")


class _RecordingBeside:
    """Writes the tables of an iteration in a thread while the next iteration is computed, or compares its record."""

    def __init__(self, recorded: Manifest, written: RunWriter, thread: ThreadPoolExecutor) -> None:
        self._recorded, self._written, self._thread = recorded, written, thread
        self._begun: Future[None] | None = None
        self._tell: Callable[[], None] = lambda: None

    def record(self, index: int, tables: Tables, tell: Callable[[], None]) -> None:
        """Begin to write iteration `index`, or compare it with its record; call `tell` once it is on disk."""
        self.settle()
        if index < self._recorded.num_iterations:
            require_as_recorded(from_recorded(self._written.run_dir, self._recorded, index, tables))
            tell()
        else:
            self._begun, self._tell = self._thread.submit(self._written.append, index, tables), tell

    def link(self, index: int) -> str:
        """Return the link of the records' chain at iteration `index`, the last one, once it is on disk."""
        if self._begun is None:
            return self._recorded.iterations[index].chain
        self._begun.result()
        return self._written.head.fingerprint  # of a run that is not complete: the last link

    def settle(self) -> None:
        """Wait until the begun iteration is on disk, and call its `tell` once. Raises what the thread raised."""
        if self._begun is not None:
            self._begun.result()
            self._begun = None
            self._tell()


def _begin(recorded: Manifest, written: RunWriter, execution: Execution[Item]) -> None:
    """Record the preparation tables; if they are recorded already, compare them."""
    for name, tree in execution.notes().items():
        written.note(name, tree)
    if execution.checkpoints is not None:
        written.list_files({**written.head.files, **execution.checkpoints.keep_start(written.run_dir)})
    tables = execution.preparation_tables()
    require_as_recorded(from_recorded(written.run_dir, recorded, None, tables))
    if new := {name: table for name, table in tables.items() if name not in recorded.preparation}:
        written.prepare(new)


def require_as_recorded(difference: Difference | None) -> None:
    """Raise PromiseBroken, naming the cell, unless `difference` is None."""
    if difference is not None:
        raise PromiseBroken(f"{difference.describe()}; the left is recorded, the right was computed now")


@contextmanager
def _keeping_unequal(run_dir: Path, execution: Execution[Item]) -> Iterator[None]:
    """Save tokens and policy if UnequalBits is raised in this block, and name the files in its message."""
    try:
        yield
    except UnequalBits as error:
        interrupts.ending()  # other processes may find the same, and end
        folder, found = run_dir / UNEQUAL, error.found
        columns = {
            "iteration": [found.iteration] * len(found.sequence),
            "sequence": found.sequence.numpy(),
            "position": found.position.numpy(),
            found.left.name: found.left.values.numpy(),
            found.right.name: found.right.values.numpy(),
        }
        try:
            with whole_folder(folder) as temporary:
                pq.write_table(pa.table(columns), temporary / UNEQUAL_TOKENS)
                execution.put_policy(temporary)
                write_sums(temporary)
        except UserError as failure:
            hint = str(failure)
        else:
            hint = f"all of them: {folder / UNEQUAL_TOKENS}"
        raise UnequalBits(f"{error}; {hint}", found) from error
