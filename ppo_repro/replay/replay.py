"""Proves that the records suffice: computes the stages of a recorded run again, compares every bit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from ppo_repro.config.records import RunRecordsConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import UserError
from ppo_repro.records import manifest, reader, schema
from ppo_repro.records.columns import iteration_tables
from ppo_repro.records.config_file import load_recorded_config
from ppo_repro.records.manifest import Manifest
from ppo_repro.replay import recorded as records_of
from ppo_repro.replay.columns import COMPUTED, STAGES, Stage, needs, taken_as_recorded
from ppo_repro.replay.recorded import Records
from ppo_repro.replay.stages import again, recorded_iteration
from ppo_repro.runs.diff import Difference, first_table_difference
from ppo_repro.stages.coefficients import first_coefficients, next_coefficients

ALL = "all"


@dataclass(frozen=True)
class Replay:
    """What computing again showed."""

    iterations: int  # computed again, the one with the difference included
    compared: Mapping[Stage, int]  # values by stage, up to the difference
    stage: Stage | None  # that differs; None where none does
    difference: Difference | None  # on the left the record, on the right what was computed again


def stages_of(name: str) -> tuple[Stage, ...]:
    """The stages of a command line, one or `all`; UserError on any other name."""
    chosen = tuple(stage for stage in STAGES if name in (stage, ALL))
    if not chosen:
        raise UserError(f"STAGE = {name!r}: must be {', '.join(STAGES)} or {ALL}")
    return chosen


def replay(run_dir: Path, stages: Sequence[Stage]) -> Replay:
    """Compute stages of a recorded language run again, from its records and config.yaml alone; no model is loaded.

    Each stage starts from what is recorded of the stages before it, so the first difference is in the stage that is
    named. Digests are not verified, so that a changed value is named. UserError where the run cannot be replayed.
    """
    recorded = reader.open_manifest(run_dir, allow_incomplete=True)
    if not manifest.has_responses(recorded):
        raise UserError(f"{run_dir}: is a {recorded.kind} run; replay is for language runs, use ppo-repro rerun")
    if not recorded.iterations:
        raise UserError(f"{run_dir}: has no recorded iteration; finish it with `ppo-repro resume {run_dir}`")
    config = load_recorded_config(run_dir)
    coefficients = first_coefficients(config)
    compared: dict[Stage, int] = dict.fromkeys(stages, 0)
    for iteration in range(recorded.num_iterations):
        records = records_of.read(run_dir, recorded, iteration)
        if iteration == 0:
            _require_columns(run_dir, config, records, stages)
        item = recorded_iteration(config, records, coefficients)
        tables = iteration_tables(again(config, item, stages), _at_full(config))
        for stage in stages:
            count, difference = _compare(config, recorded, records, tables, stage)
            compared[stage] += count
            if difference is not None:
                return Replay(iteration + 1, compared, stage, difference)
        coefficients = next_coefficients(
            config, coefficients, item.forward, item.advantages, item.updates, len(item.rollout.lengths)
        )
    return Replay(recorded.num_iterations, compared, None, None)


def _at_full(config: RunConfig) -> RunConfig:
    """The configuration of the tables to compute: all columns that follow from records, whatever the run recorded."""
    return config.model_copy(update={"records": RunRecordsConfig(level="full")})


def _require_columns(run_dir: Path, config: RunConfig, records: Records, stages: Collection[Stage]) -> None:
    """Raise UserError for the first stage that needs a column which was not recorded."""
    for need in needs(config):
        if need.stage in stages and not records.has(need.table, need.column):
            others = ", ".join(stage for stage in STAGES if stage not in {n.stage for n in needs(config)})
            raise UserError(
                f"{run_dir}: stage {need.stage} needs column {need.column} of table {need.table}, which level lean "
                f"and earlier versions do not record; record at records.level = full, or replay one of {others}"
            )


def _compare(
    config: RunConfig, recorded: Manifest, records: Records, computed: Mapping[str, pa.Table], stage: Stage
) -> tuple[int, Difference | None]:
    """How many values of a stage were compared, and the first difference."""
    count = 0
    for table in manifest.tables_of(recorded):
        names = COMPUTED[stage].get(table.name, ())
        compared = _compared_columns(config, records, table, names)
        left, right = records.tables[table.name], computed[table.name]
        difference = first_table_difference(replace(table, columns=compared), left, right, records.iteration)
        if difference is not None:
            return count, difference
        count += sum(_values_in(left, column.name) for column in compared)
    return count, None


def _compared_columns(
    config: RunConfig, records: Records, table: schema.Table, names: Collection[str]
) -> tuple[schema.Column, ...]:
    """The columns that were recorded and are computed here; null in every row counts where level lean has them too."""
    inputs = taken_as_recorded(config)
    if "evaluations" not in records.tables:
        inputs |= {("iterations", "eval_accuracy"), ("iterations", "eval_score")}
    return tuple(
        column
        for column in table.columns
        if column.name in names
        and (table.name, column.name) not in inputs
        and (column.in_fingerprint or records.has(table.name, column.name))
    )


def _values_in(table: pa.Table, name: str) -> int:
    """Recorded values of a column; nulls are compared too and not counted."""
    return int(np.count_nonzero(table.column(name).is_valid().to_numpy()))


def lines(replayed: Replay) -> list[str]:
    """One line per stage, and the difference where there is one."""
    iterations = f"{replayed.iterations} iteration{'s' if replayed.iterations != 1 else ''}"
    found = []
    for stage, count in replayed.compared.items():
        if stage == replayed.stage:
            assert replayed.difference is not None
            found.append(f"{stage}: different: {replayed.difference.describe()}; the left is recorded")
            break
        found.append(f"{stage}: {count:,} values identical in {iterations}")
    return found
