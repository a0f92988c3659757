"""Executing a recorded run again, to compare every buffer with the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ppo_repro.clock import Clock
from ppo_repro.records import digests, manifest, reader
from ppo_repro.records.diff import Difference, first_final_difference, from_recorded
from ppo_repro.records.folder import FORKED_FROM
from ppo_repro.records.manifest import Manifest
from ppo_repro.runs.kind import Config, Item, RunKind
from ppo_repro.runs.models_kept import load_start
from ppo_repro.runs.resume import recorded_config
from ppo_repro.runs.run import require_same_start


@dataclass(frozen=True)
class Rerun:
    """What running again showed."""

    difference: Difference | None
    fingerprint: str  # of the new execution, as far as it went
    iterations: int  # computed again


def rerun(
    kind: RunKind[Config, Item], run_dir: Path, overrides: Sequence[str] = (), elsewhere: Path | None = None
) -> Rerun:
    """Execute a recorded configuration again, in memory, and compare every buffer with the files.

    `overrides` may change what must not change a bit. `elsewhere`: where models may lie by now. Of a fork only its own
    iterations are computed. Stops at the first difference. UserError if the run is incomplete or damaged, an input is
    nowhere or an override could change a result. Of several processes the first one compares; all return the same.
    """
    recorded = reader.open_manifest(run_dir)
    config = recorded_config(kind, run_dir, recorded, overrides, elsewhere)
    start = None if recorded.origin is None else load_start(run_dir, recorded, FORKED_FROM)
    opened = kind.open(config, None, start)
    del start  # as large as weights and moments together
    require_same_start(kind.ranks, config, recorded.inputs)
    begun = 0 if recorded.origin is None else recorded.origin.iteration
    fingerprint = digests.FINGERPRINT_SEED if recorded.origin is None else recorded.origin.fingerprint
    first = kind.ranks.first
    with opened as execution:
        difference = first(from_recorded, run_dir, recorded, None, execution.preparation_tables())
        if difference is not None:
            return Rerun(difference, fingerprint, 0)
        for item in execution.iterations():
            tables = execution.tables(item)
            difference = first(from_recorded, run_dir, recorded, item.index, tables)
            fingerprint = first(_next_link, recorded, tables, fingerprint)
            if difference is not None:
                return Rerun(difference, fingerprint, item.index + 1 - begun)
            kind.watcher.iteration(item.index + 1, config.iterations, execution.progress(item))
        results, side_tables = execution.ending(Clock())
    difference = first(from_recorded, run_dir, recorded, recorded.num_iterations, side_tables)
    difference = difference or first_final_difference(recorded.final, results)
    return Rerun(difference, manifest.finished_fingerprint(fingerprint, results), config.iterations - begun)


def _next_link(recorded: Manifest, tables: Mapping[str, pa.Table], fingerprint: str) -> str:
    """The fingerprint with the tables of one more iteration."""
    links = {t.name: digests.table_digest(t, tables[t.name]) for t in manifest.tables_of(recorded)}
    return digests.chain(fingerprint, links)
