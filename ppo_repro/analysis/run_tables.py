"""Read the tables of a run for an analysis, by default without the iterations that a fork copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from ppo_repro.base.errors import UserError
from ppo_repro.config.run import RunConfig
from ppo_repro.records import reader
from ppo_repro.records.folder import load_recorded_config
from ppo_repro.records.manifest import Manifest, require_responses


@dataclass(frozen=True)
class RunTables:
    """A run whose manifest is read, and the iterations that an analysis reads."""

    run_dir: Path | str
    recorded: Manifest
    iterations: Sequence[int]

    @cached_property
    def config(self) -> RunConfig:
        """Return the configuration of a language run. Raises UserError if it is damaged, or for another kind."""
        return load_recorded_config(self.run_dir)

    def read(self, table: str, columns: Sequence[str] | None = None, iteration: int | None = None) -> pd.DataFrame:
        """Return the rows of a table (`records.reader.read_table`): of one iteration, or of all `iterations` (None)."""
        chosen = self.iterations if iteration is None else [iteration]
        return reader.read_table(table, self.run_dir, iterations=chosen, columns=columns, recorded=self.recorded)


def run_tables(
    run_dir: Path | str, iterations: Sequence[int] | None = None, allow_incomplete: bool = False
) -> RunTables:
    """Open a language run to read `iterations`; None: all that the run computed itself, with its own settings.

    Raises UserError for a run that is damaged or has no responses, for an incomplete run unless `allow_incomplete`, for
    an empty list, and for an iteration of a fork's origin.
    """
    recorded = reader.open_manifest(run_dir, allow_incomplete)
    require_responses(run_dir, recorded)
    computed = recorded.own_iterations
    chosen = computed if iterations is None else chosen_iterations(recorded, iterations)
    if copied := [i for i in chosen if 0 <= i < computed.start]:
        whose = "is of the run that was forked, which has settings of its own; give the folder of that run"
        raise UserError(f"{run_dir}: iteration {copied[0]} {whose}")
    return RunTables(run_dir, recorded, chosen)


def chosen_iterations(recorded: Manifest, iterations: Sequence[int] | None) -> Sequence[int]:
    """Return `iterations`, or all recorded iterations if None. Raises UserError for an empty list."""
    if iterations is not None and not len(iterations):
        raise UserError("iterations = []: names no iteration; leave it out for all iterations")
    return range(recorded.num_iterations) if iterations is None else iterations
