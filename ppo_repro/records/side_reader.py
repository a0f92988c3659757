"""Recorded side tables as pandas frames, checked against the manifest. Never imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa

from ppo_repro.errors import UserError
from ppo_repro.records import manifest, reader
from ppo_repro.records.manifest import SideFile


def read_side_file(run_dir: Path, file: SideFile, verify: bool) -> pa.Table:
    """One file of a side table in the schema's plain types; UserError where it is missing or damaged."""
    return reader.read_file(file.path(run_dir), file.table, file.entry, verify)


@dataclass(frozen=True)
class SideTableReader:
    """Reads all of one side table; raises UserError where the run has none, or on anything damaged."""

    table_name: str

    def __call__(
        self,
        run_dir: Path | str,
        *,
        columns: Sequence[str] | None = None,
        verify: bool = True,
        allow_incomplete: bool = False,
    ) -> pd.DataFrame:
        """All rows in the order in which they were computed; `verify` compares them with the manifest's digests."""
        folder = Path(run_dir)
        recorded = reader.open_manifest(folder, allow_incomplete)
        files = [file for file in manifest.side_files(recorded) if file.table.name == self.table_name]
        if not files:
            raise UserError(f"{folder}: holds no table {self.table_name}; the run had nothing to record in it")
        chosen = reader.checked_columns(folder, files[0].table, columns)
        names = [column.name for column in chosen]
        return reader.to_frame(chosen, [read_side_file(folder, file, verify).select(names) for file in files])


read_evaluations = SideTableReader("evaluations")  # one row per held-out prompt and evaluation
read_warm_start_steps = SideTableReader("warm_start_steps")  # one row per supervised step before PPO
read_pairs = SideTableReader("pairs")  # one row per preference pair
read_pair_updates = SideTableReader("pair_updates")  # one row per training pair and epoch
read_pair_steps = SideTableReader("pair_steps")  # one row per optimizer step of the reward model
