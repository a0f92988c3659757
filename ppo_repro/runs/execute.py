"""Compute the iterations of a run one by one, and record each while the next one is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Generic

import pyarrow as pa
import pyarrow.parquet as pq

from ppo_repro.base import interrupts
from ppo_repro.base.clock import OTHER, Clock
from ppo_repro.base.errors import PromiseBroken, UserError
from ppo_repro.base.files import whole_folder, write_sums
from ppo_repro.records import manifest
from ppo_repro.records.diff import Difference, from_recorded
from ppo_repro.records.folder import TIMES_NAME, UNEQUAL, UNEQUAL_TOKENS
from ppo_repro.records.manifest import FinalResults, Manifest
from ppo_repro.records.writer import RunWriter
from ppo_repro.runs.kept_checkpoints import Checkpoints, require_room
from ppo_repro.runs.kind import Config, Execution, Item, RunKind, Tables
from ppo_repro.runs.starting_point import Start
from ppo_repro.stages.equal_bits import UnequalBits


def execute(kind: RunKind[Config, Item], config: Config, run_dir: Path, start: Start | None, clock: Clock) -> None:
    """Compute a run and record it in its folder until it is complete.

    Args:
        start: the state after iterations that are recorded; None: the run begins with the first iteration.
        clock: assigns every second to a phase.

    Raises:
        PromiseBroken: an iteration that is already recorded differs when it is computed again; names the first cell.
        UnequalBits: an iteration breaks a promise of deterministic numerics; it is not recorded.
        UserError: the disk lacks room for the run's models and checkpoints.
    """
    recorded, written = manifest.load(run_dir), RunWriter(run_dir)
    with (
        kind.open(config, run_dir, start) as execution,
        ThreadPoolExecutor(1, "records") as thread,  # after an error it writes what it has begun
        _keeping_unequal(run_dir, execution),
    ):
        require_room(run_dir, execution.bytes_to_keep(run_dir))
        recorder = _Recorder(execution, recorded, written, thread, clock)
        recorder.begin()
        for item in execution.iterations():
            clock.divide(item.seconds)
            done, seconds = item.index + 1, sum(item.seconds.values())
            tell = partial(kind.watcher.iteration, done, config.iterations, execution.progress(item), seconds)
            recorder.record(item, tell)
        results, side_tables = recorder.end()
    recorder.close(results, side_tables)


class _Recorder(Generic[Item]):
    """Records an execution. A thread writes the tables of an iteration while the next iteration is computed.

    Each public method ends a phase of the clock.
    """

    def __init__(
        self,
        execution: Execution[Item],
        recorded: Manifest,
        written: RunWriter,
        thread: ThreadPoolExecutor,
        clock: Clock,
    ) -> None:
        self._execution, self._recorded, self._written = execution, recorded, written
        self._thread, self._clock = thread, clock
        self._computed = 0
        self._begun: Future[None] | None = None
        self._tell: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Record notes, the start of checkpoints and the preparation tables; compare tables that are recorded."""
        execution, recorded, written = self._execution, self._recorded, self._written
        for name, tree in execution.notes().items():
            written.note(name, tree)
        if execution.checkpoints is not None:
            written.list_files({**written.head.files, **execution.checkpoints.keep_start(written.run_dir)})
        tables = execution.preparation_tables()
        require_as_recorded(from_recorded(written.run_dir, recorded, None, tables))
        if new := {name: table for name, table in tables.items() if name not in recorded.preparation}:
            written.prepare(new)
        self._clock.lap("preparation")

    def record(self, item: Item, tell: Callable[[], None]) -> None:
        """Begin to write an iteration, or compare it with its record; save a checkpoint if it is due.

        `tell` is called once the iteration is on disk.
        """
        tables, checkpoints = self._execution.tables(item), self._execution.checkpoints
        self._computed += 1
        self._settle()
        if item.index < self._recorded.num_iterations:
            require_as_recorded(from_recorded(self._written.run_dir, self._recorded, item.index, tables))
            tell()
        else:
            self._begun, self._tell = self._thread.submit(self._written.append, item.index, tables), tell
        is_due = checkpoints is not None and checkpoints.is_due(item.index + 1)
        if checkpoints is not None and is_due:
            self._save(checkpoints, item.index)
        if self._computed == 1 or is_due:  # the first iteration says how long an iteration may take
            self._settle()
        self._clock.lap("records")

    def _save(self, checkpoints: Checkpoints, index: int) -> None:
        """Save a checkpoint after iteration `index`, once the iteration is on disk."""
        if self._begun is None:
            link = self._recorded.iterations[index].chain
        else:
            self._begun.result()
            link = self._written.head.fingerprint  # in an incomplete run, the last link of the chain
        self._clock.lap("records")
        self._written.keep_only(checkpoints.save(self._written.run_dir, self._written.head, link))
        self._clock.lap("checkpoints")

    def _settle(self) -> None:
        """Wait until the begun iteration is on disk, and call its `tell` once. Raises what the thread raised."""
        if self._begun is not None:
            self._begun.result()
            self._begun = None
            self._tell()

    def end(self) -> tuple[FinalResults, Tables]:
        """Save the trained models, and return the final results and side tables."""
        self._clock.lap(OTHER)
        self._settle()
        self._clock.lap("records")
        results = self._execution.ending(self._clock)
        self._clock.lap(OTHER)
        models = self._execution.keep_models(self._written.run_dir, self._written.head.fingerprint)
        self._written.list_files({**self._written.head.files, **models})
        self._clock.lap("models")
        return results

    def close(self, results: FinalResults, side_tables: Tables) -> None:
        """Record the final results of a closed execution. The run is complete then."""
        self._clock.lap("closing")
        for name, tree in self._execution.closing_notes().items():
            self._written.note(name, tree)
        self._written.note(TIMES_NAME, {"iterations": self._computed, "seconds": self._clock.seconds})
        self._written.finish(results, side_tables)
        self._clock.lap("records")


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
        interrupts.ending()  # other processes may find the same difference, and end
        folder, tokens = run_dir / UNEQUAL, error.found
        columns = {
            "iteration": [tokens.iteration] * len(tokens.sequence),
            "sequence": tokens.sequence.numpy(),
            "position": tokens.position.numpy(),
            tokens.left.name: tokens.left.values.numpy(),
            tokens.right.name: tokens.right.values.numpy(),
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
        raise UnequalBits(f"{error}; {hint}", tokens) from error


def work_along(kind: RunKind[Config, Item], config: Config, start: Start | None) -> None:
    """Compute a run without recording it. Every process except the first one does this."""
    with kind.open(config, None, start) as execution:
        checkpoints = execution.checkpoints
        for item in execution.iterations():
            if checkpoints is not None and checkpoints.is_due(item.index + 1):
                checkpoints.give_moments()
        execution.ending(Clock())
        if checkpoints is not None and checkpoints.keeps_final_state:
            checkpoints.give_moments()
