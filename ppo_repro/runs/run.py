"""The runner: executes a run of any kind, resumes it, and executes it again to compare every bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import pyarrow as pa

from ppo_repro.clock import OTHER, Clock, as_text
from ppo_repro.config.control import ControlConfig
from ppo_repro.config.files import dump_yaml
from ppo_repro.config.run import RunConfig
from ppo_repro.config.section import run_folder
from ppo_repro.errors import PromiseBroken, UserError
from ppo_repro.files import atomic_write, check_links, only_writer
from ppo_repro.ranks import Ranks
from ppo_repro.records import digests, manifest, reader, schema, times, writer
from ppo_repro.records.config_file import RESUMED, check_config
from ppo_repro.records.contents import check_contents, files_to_resume_with, remove_unfinished
from ppo_repro.records.manifest import Head, Manifest
from ppo_repro.records.times import STARTED
from ppo_repro.runs.diff import Difference, first_final_difference, iteration_difference, side_difference
from ppo_repro.runs.environment import check_inputs, file_digests
from ppo_repro.runs.kind import Config, Execution, Item, RunKind
from ppo_repro.runs.lifetime import appending, kept_if_unequal, mark_ended, new_run, tell


def run(
    kind: RunKind[Config, Item], config: Config, out: Path, clock: Clock | None = None
) -> tuple[Path, dict[str, float]]:
    """Execute a configuration and record everything; returns the run folder and wall seconds by phase and in total.

    UserError for anything the user has to correct; a run that fails midway keeps its complete iterations.
    Of several ranks the first one records. `clock`: one that runs already, whose phases count too.
    """
    clock = Clock() if clock is None else clock
    run_dir, ranks = run_folder(config, out), kind.ranks
    execution = kind.begin(config, run_dir if ranks.is_first else None)
    inputs = file_digests(kind.input_files(config))
    clock.lap("inputs")
    if not ranks.is_first:
        _require_same_start(ranks, config, inputs)
        _work_along(execution)
        return run_dir, {}
    environment = {**kind.environment(config), STARTED: as_text(clock.started)}
    temporary = writer.lay_out_run(run_dir, dump_yaml(config), environment, config.digest(), inputs, kind.name)
    with new_run(temporary, run_dir):
        _require_same_start(ranks, config, inputs)
        clock.lap("records")
        execute(kind, config, run_dir, execution, clock)
    return run_dir, clock.with_total()


def _require_same_start(ranks: Ranks, config: RunConfig | ControlConfig, inputs: Mapping[str, str]) -> None:
    ranks.require_same("configuration", config.digest())
    ranks.require_same("input files", sorted(inputs.values()))


def _work_along(opened: AbstractContextManager[Execution[Item]]) -> None:
    """What a rank does that does not record: everything else."""
    with opened as execution:
        for _ in execution.iterations():
            pass
        execution.ending(Clock())


def execute(
    kind: RunKind[Config, Item],
    config: Config,
    run_dir: Path,
    opened: AbstractContextManager[Execution[Item]],
    clock: Clock,
) -> None:
    """Record an execution in its run folder until it is complete; every second of it is in a phase of `clock`.

    An iteration that is recorded already is compared instead: PromiseBroken names the first cell that differs.
    UnequalBits where an iteration does not keep what deterministic numerics promise; it is not recorded.
    """
    recorded, total, computed = manifest.load(run_dir), config.ppo.iterations, 0
    with (
        opened as execution,
        appending(run_dir, _begun(run_dir, recorded, execution), config.records.iterations_per_file) as appender,
        kept_if_unequal(run_dir, execution.store),
    ):
        clock.lap("preparation")
        kind.watcher.begins()
        untold = deque[tuple[int, str]]()
        for item in execution.iterations():
            clock.divide(item.seconds)
            computed, done = computed + 1, item.index + 1
            tables = execution.tables(item)
            current = appender.settle()
            clock.lap("records")
            tell(kind.watcher, untold, current, total)
            untold.append((done, execution.progress(item)))
            clock.lap("progress")
            is_recorded = item.index < recorded.num_iterations
            if is_recorded:
                _require_none(iteration_difference(run_dir, recorded, item.index, tables))
            else:
                appender.start(item.index, tables)
            clock.lap("records")
            if execution.store is not None and execution.store.is_due(done):
                current = appender.finish()  # a checkpoint names the chain it follows
                clock.lap("records")
                # while the run is not complete its fingerprint is the last link
                execution.store.save(recorded.iterations[item.index].chain if is_recorded else current.fingerprint)
                clock.lap("checkpoints")
            if computed == 1:  # the first is waited for: from it comes how long the others may take
                current = appender.settle()
                clock.lap("records")
                tell(kind.watcher, untold, current, total)
        clock.lap(OTHER)
        current = appender.finish()
        clock.lap("records")
        tell(kind.watcher, untold, current, total)
        clock.lap("progress")
        ending, files = execution.ending(clock), dict(current.files)
        if execution.store is not None:
            clock.lap(OTHER)
            files |= execution.store.finish(current.fingerprint)  # of a run that is not complete: the last link
            clock.lap("models")
    clock.lap("closing")
    notes = times.write(run_dir, times.Times(computed, clock.seconds))
    writer.finish(run_dir, current, ending.results, notes, files, ending.tables)
    clock.lap("records")


def _begun(run_dir: Path, recorded: Manifest, execution: Execution[Item]) -> Head:
    """The manifest without its iterations, after notes and tables of the preparation are on disk.

    It has the digests of the notes and of what the store keeps. Tables that are recorded already are compared instead:
    PromiseBroken names the first cell that differs.
    """
    current, noted = manifest.head_of(recorded), {}
    for name, tree in execution.notes.items():
        content = manifest.note_content(tree)
        atomic_write(run_dir / name, content)
        noted[name] = manifest.content_digest(content)
    files = {**recorded.files, **({} if execution.store is None else execution.store.files)}
    if noted or files != recorded.files:
        current = writer.mark(run_dir, current, "running", noted, files)
    tables = execution.preparation_tables()
    if not recorded.preparation:
        return writer.record_preparation(run_dir, current, tables) if tables else current
    _require_none(side_difference(run_dir, recorded, None, tables))
    return current


def _require_none(difference: Difference | None) -> None:
    if difference is not None:
        raise PromiseBroken(f"{difference.describe()}; the left is recorded, the right was computed now")


def _recorded_config(
    kind: RunKind[Config, Item], run_dir: Path, recorded: Manifest, overrides: Sequence[str]
) -> Config:
    """The configuration of a recorded run with `overrides`; UserError for one that could change a result."""
    groups = f"{', '.join(kind.changeable[:-1])} and {kind.changeable[-1]}"
    for override in overrides:
        if not override.startswith(tuple(f"{group}{end}" for group in kind.changeable for end in ".=")):
            raise UserError(
                f"--set {override}: a recorded run may change fields of {groups} only; "
                "for another field start a run of its own"
            )
    check_config(run_dir, recorded)
    return kind.load_config(run_dir / "config.yaml", overrides)


@dataclass(frozen=True)
class Resumed:
    """What was there when a run was resumed."""

    start: int  # iterations of the checkpoint, 0 without one
    recorded: int  # iterations recorded by then; those from `start` on were computed again and compared


def resume(kind: RunKind[Config, Item], run_dir: Path, overrides: Sequence[str] = ()) -> Resumed:
    """Continue a run from where its kind can, or from the beginning, until it is complete.

    `overrides` may change what must not change a bit. UserError if another process writes the run, it is finished,
    a file of it is damaged, its inputs have changed or an override could change a result; then nothing has changed.
    Of several ranks, which all read the run's folder, the first one records.
    PromiseBroken if an iteration computed again differs from its record.
    """
    clock, ranks = Clock(), kind.ranks
    manifest.load(run_dir)  # before a lock is put into a folder that is no run
    check_links(run_dir)
    if not ranks.is_first:
        return _resume_along(kind, run_dir, overrides)
    with only_writer(run_dir):
        recorded = manifest.load(run_dir)
        if recorded.status == "complete":
            raise UserError(f"{run_dir}: the run is finished; look at it with `ppo-repro show {run_dir}`")
        writer.require_current_format(run_dir, recorded)
        config = _recorded_config(kind, run_dir, recorded, overrides)
        resumption = kind.resume(config, run_dir, recorded)
        _require_same_start(ranks, config, recorded.inputs)
        ranks.require_same("iterations to go on from", (resumption.start, recorded.num_iterations))
        kept = files_to_resume_with(recorded, begins_again=resumption.start == 0)
        contents = check_contents(run_dir, recorded.model_copy(update={"files": kept}))
        clock.lap("inputs")
        environment = {**kind.environment(config), STARTED: as_text(clock.started)}
        tree = {"iteration": resumption.start, "overrides": list(overrides), "environment": environment}
        try:
            writer.mark(run_dir, recorded, "running", files=kept)
            remove_unfinished(run_dir, contents)
            writer.mark(run_dir, manifest.load_head(run_dir), "running", _write_note(run_dir, recorded, tree))
            clock.lap("records")
            execute(kind, config, run_dir, resumption.execution, clock)
        except BaseException as error:
            mark_ended(run_dir, error)
            raise
    return Resumed(resumption.start, recorded.num_iterations)


def _resume_along(kind: RunKind[Config, Item], run_dir: Path, overrides: Sequence[str]) -> Resumed:
    """What a rank does that does not record while the first one resumes. It has read all it needs by the exchanges."""
    recorded = manifest.load(run_dir)
    config = _recorded_config(kind, run_dir, recorded, overrides)
    resumption = kind.resume(config, run_dir, recorded)
    _require_same_start(kind.ranks, config, recorded.inputs)
    kind.ranks.require_same("iterations to go on from", (resumption.start, recorded.num_iterations))
    _work_along(resumption.execution)
    return Resumed(resumption.start, recorded.num_iterations)


def _write_note(run_dir: Path, recorded: Manifest, tree: Mapping[str, Any]) -> dict[str, str]:
    """Write the next resumed-NNN.json; returns its digest by file name."""
    content = manifest.note_content(tree)
    name = f"resumed-{sum(PurePath(note).match(RESUMED) for note in recorded.notes) + 1:03d}.json"
    atomic_write(run_dir / name, content)
    return {name: manifest.content_digest(content)}


@dataclass(frozen=True)
class Rerun:
    """What running again showed."""

    difference: Difference | None
    fingerprint: str  # of the new execution, as far as it went
    iterations: int


def rerun(kind: RunKind[Config, Item], run_dir: Path, overrides: Sequence[str] = ()) -> Rerun:
    """Execute a recorded configuration again, in memory, and compare every buffer with the files.

    `overrides` may change what must not change a bit. Stops at the first difference. UserError if the run is
    incomplete or damaged, its configuration or inputs have changed or an override could change a result. Of several
    ranks the first one compares; all return the same.
    """
    recorded = reader.open_manifest(run_dir)
    config = _recorded_config(kind, run_dir, recorded, overrides)
    opened = kind.begin(config, None)
    check_inputs(recorded.inputs)
    _require_same_start(kind.ranks, config, recorded.inputs)
    fingerprint = digests.FINGERPRINT_SEED
    with opened as execution:
        prepared = execution.preparation_tables()
        difference = kind.ranks.first(side_difference, run_dir, recorded, None, prepared)
        if difference is not None:
            return Rerun(difference, fingerprint, 0)
        for item in execution.iterations():
            tables = execution.tables(item)
            fingerprint, difference = kind.ranks.first(_compare, run_dir, recorded, item.index, tables, fingerprint)
            if difference is not None:
                return Rerun(difference, fingerprint, item.index + 1)
            kind.watcher.iteration(item.index + 1, config.ppo.iterations, execution.progress(item))
        ending = execution.ending(Clock())
    difference = kind.ranks.first(side_difference, run_dir, recorded, recorded.num_iterations, ending.tables)
    difference = difference or first_final_difference(recorded.final, ending.results)
    return Rerun(difference, manifest.finished_fingerprint(fingerprint, ending.results), config.ppo.iterations)


def _compare(
    run_dir: Path, recorded: Manifest, iteration: int, tables: Mapping[str, pa.Table], fingerprint: str
) -> tuple[str, Difference | None]:
    """The fingerprint with this iteration added, and the first difference from the recorded one."""
    known = [(t, tables[t.name]) for t in manifest.tables_of(recorded)]
    links = {t.name: digests.table_digest(schema.as_built(t, of.column_names), of) for t, of in known}
    return digests.chain(fingerprint, links), iteration_difference(run_dir, recorded, iteration, tables)
