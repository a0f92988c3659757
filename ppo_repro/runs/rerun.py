"""Execute a recorded run again, and compare every number with its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ppo_repro.base.clock import Clock
from ppo_repro.base.errors import UserError
from ppo_repro.config.rollout import OwnEngine
from ppo_repro.config.run import RunConfig
from ppo_repro.records import digests, folder, manifest, reader
from ppo_repro.records.diff import Difference, first_final_difference, from_recorded
from ppo_repro.records.manifest import Manifest
from ppo_repro.runs.kind import Config, Execution, Item, RunKind
from ppo_repro.runs.machines import on_every_machine
from ppo_repro.runs.recorded_inputs import Continued, continued
from ppo_repro.runs.starting_point import load_start


@dataclass(frozen=True)
class Rerun:
    """The result of executing a run again."""

    difference: Difference | None
    fingerprint: str  # over the records up to `begun`, then over the iterations computed again
    begun: int  # iterations of the checkpoint at which the rerun began; 0 without a checkpoint
    iterations: int  # number of iterations computed again
    taken: str | None = None  # the engine whose samples were read from the records; None if all were drawn again


def rerun(
    kind: RunKind[Config, Item],
    run_dir: Path,
    overrides: Sequence[str] = (),
    elsewhere: Path | None = None,
    only: range | None = None,
) -> Rerun:
    """Execute a recorded configuration again, in memory, and compare every buffer with the files.

    For a fork, only its own iterations are computed. Samples of a user's own engine are read from the records. The
    first difference stops the rerun. If there are several processes, the first one compares and all return its result.

    Args:
        run_dir: the recorded run, which may be incomplete if `only` is given.
        overrides: fields, as after --set, that must not change a bit.
        elsewhere: another folder to search for models that moved.
        only: indices from 0 of the iterations to compare; iterations since the newest checkpoint before them are
            computed too. None: all iterations, and the final results.

    Raises:
        UserError: the run is incomplete or damaged, an input is missing, iterations of `only` are not recorded, or an
            override could change a result.
    """
    plan = kind.ranks.first(_to_rerun, kind, run_dir, overrides, elsewhere, only)
    with on_every_machine(kind.ranks, plan.config, lambda: plan.files) as (config, here):
        start = load_start(here(run_dir), plan.recorded, plan.checkpoint) if plan.checkpoint else None
        begun = 0 if start is None else start.checkpoint.iteration
        with kind.over(run_dir, config.iterations).open(config, None, start) as execution:
            return _compared(kind, run_dir, replace(plan, config=config), execution, begun, only)


def _to_rerun(
    kind: RunKind[Config, Item], run_dir: Path, overrides: Sequence[str], elsewhere: Path | None, only: range | None
) -> Continued[Config]:
    """Find the checkpoint from which a run is computed again, and its inputs."""
    recorded = reader.open_manifest(run_dir, allow_incomplete=only is not None)
    begun = recorded.own_iterations.start
    names = folder.starts_of(run_dir, recorded)
    if only is not None:
        _require_own(only, begun, run_dir, recorded)
        begun = max([number for number in names if number <= only.start], default=begun)
    name = names.get(begun, folder.FORKED_FROM) if begun else None
    return continued(kind, run_dir, recorded, overrides, kind.changeable, elsewhere, name)


def _compared(
    kind: RunKind[Config, Item],
    run_dir: Path,
    plan: Continued[Config],
    execution: Execution[Item],
    begun: int,
    only: range | None,
) -> Rerun:
    """Execute a run after its first `begun` iterations, and compare it with its records; see `rerun`."""
    config, recorded = plan.config, plan.recorded
    taken = None
    if isinstance(config, RunConfig) and isinstance(config.rollout.engine, OwnEngine):
        taken = config.rollout.engine_without_promise
    fingerprint = recorded.iterations[begun - 1].chain if begun else digests.FINGERPRINT_SEED
    first, done, end = kind.ranks.first, begun, config.iterations if only is None else only.stop
    difference = first(from_recorded, run_dir, recorded, None, execution.preparation_tables())
    items = execution.iterations()
    while difference is None and done < end:
        item = next(items)
        tables, done = execution.tables(item), item.index + 1
        difference = first(from_recorded, run_dir, recorded, item.index, tables)
        results = {t.name: digests.table_digest(t, tables[t.name]) for t in manifest.tables_of(recorded)}
        fingerprint = digests.chain(fingerprint, results)
        if difference is None:
            seconds = sum(item.seconds.values())
            kind.watcher.iteration(done, config.iterations, execution.progress(item), seconds)
    if difference is None and only is None:
        final, side_tables = execution.ending(Clock())
        difference = first(from_recorded, run_dir, recorded, recorded.num_iterations, side_tables)
        difference = difference or first_final_difference(recorded.final, final)
        fingerprint = manifest.finished_fingerprint(fingerprint, final)
    return Rerun(difference, fingerprint, begun, done - begun, taken)


def _require_own(only: range, begun: int, run_dir: Path, recorded: Manifest) -> None:
    """Raise UserError unless all iterations of `only` are recorded and none of the `begun` ones of a fork's origin."""
    if begun <= only.start and only.stop <= recorded.num_iterations:
        return
    of_origin = f"; the {begun} iterations before them are of the run from which it was forked" if begun else ""
    if begun == recorded.num_iterations:
        raise UserError(f"--iterations: {run_dir} has recorded no iteration of its own{of_origin}")
    raise UserError(
        f"--iterations {only.start}:{only.stop - 1}: {run_dir} has recorded iterations {begun} to "
        f"{recorded.num_iterations - 1}{of_origin}; choose some of these"
    )
