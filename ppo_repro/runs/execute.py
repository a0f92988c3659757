"""Compute the iterations of an open run one by one, and record each while the next one is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ppo_repro.base import interrupts
from ppo_repro.base.clock import OTHER, Clock
from ppo_repro.base.errors import PromiseBroken, UserError
from ppo_repro.base.files import whole_folder, write_sums
from ppo_repro.records import manifest
from ppo_repro.records.diff import Difference, from_recorded
from ppo_repro.records.folder import TIMES_NAME, UNEQUAL, UNEQUAL_TOKENS
from ppo_repro.records.manifest import Manifest
from ppo_repro.records.writer import RunWriter
from ppo_repro.runs.kept_checkpoints import require_room
from ppo_repro.runs.kind import Config, Execution, Item, RunKind, Tables
from ppo_repro.stages.agreement import UnequalBits


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
        checkpoints = execution.checkpoints
        clock.lap("preparation")
        recorder = _Recorder(recorded, written, thread)
        for item in execution.iterations():
            clock.divide(item.seconds)
            computed, done, seconds = computed + 1, item.index + 1, sum(item.seconds.values())
            tell = partial(kind.watcher.iteration, done, config.iterations, execution.progress(item), seconds)
            recorder.record(item.index, execution.tables(item), tell)
            is_due = checkpoints is not None and checkpoints.is_due(done)
            if checkpoints is not None and is_due:
                link = recorder.link(item.index)
                clock.lap("records")
                written.keep_only(checkpoints.save(run_dir, written.head, link))
                clock.lap("checkpoints")
            if computed == 1 or is_due:  # the first iteration says how long the others may take
                recorder.settle()
            clock.lap("records")
        clock.lap(OTHER)
        recorder.settle()
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


class _Recorder:
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


def work_along(opened: AbstractContextManager[Execution[Item]]) -> None:
    """Compute a run without recording it; every process except the first one does this."""
    with opened as execution:
        checkpoints = execution.checkpoints
        for item in execution.iterations():
            if checkpoints is not None and checkpoints.is_due(item.index + 1):
                checkpoints.give_moments()
        execution.ending(Clock())
        if checkpoints is not None and checkpoints.keeps_final_state:
            checkpoints.give_moments()
