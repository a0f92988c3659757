"""Recorded runs as pandas frames, checked against their manifest, without torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import file_digest, read_regular
from ppo_repro.records import digests, manifest, schema
from ppo_repro.records.manifest import Manifest, TableEntry

_DAMAGED = "does not match the manifest; the file was changed or damaged"
_OTHER_BYTES = "has another SHA-256 than when it was written; the file was changed or damaged"


def open_manifest(run_dir: Path | str, allow_incomplete: bool = False) -> Manifest:
    """Read the manifest of a run. Raises UserError if it is damaged, or unfinished and not `allow_incomplete`."""
    recorded = manifest.load(Path(run_dir))
    if recorded.status != "complete" and not allow_incomplete:
        raise UserError(
            f"{run_dir}: the run is {recorded.status} after {len(recorded.iterations)} recorded iterations; "
            f"finish it with `ppo-repro resume {shlex.quote(str(run_dir))}`, or allow incomplete runs"
        )
    return recorded


def read_moment(run_dir: Path, recorded: Manifest, iteration: int | None, verify: bool = True) -> dict[str, pa.Table]:
    """Read every table of one moment of a run, by name.

    Args:
        iteration: None is the moment before the first iteration; the number of iterations is after the last one.
        verify: whether bytes and values are compared with their digests.

    Raises:
        UserError: a table is damaged.
    """
    return {
        found.table.name: read_file(found.path(run_dir), found.table, found.entry, verify)
        for found in manifest.recorded_at(recorded, iteration)
    }


def read_file(path: Path, table: schema.Table, entry: TableEntry, verify: bool = True) -> pa.Table:
    """Read one file of any table in the schema's plain types. A column that the file lacks is null.

    Args:
        verify: whether first its bytes, then its values are compared with the digests.

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        content = read_checked(path, entry.file_digest) if verify else read_regular(path)
        loaded = pq.ParquetFile(pa.BufferReader(content)).read()
        loaded.validate(full=True)
        if verify and (loaded.num_rows != entry.rows or digests.table_digest(table, loaded) != entry.digest):
            raise UserError(f"{path}: {_DAMAGED}")
        there = [c for c in table.columns if c.name in loaded.column_names or not c.may_be_missing]
        plain = {c.name: digests.plain(c.kind, loaded.column(c.name)) for c in there}
    except (OSError, ValueError, KeyError, MemoryError, pa.ArrowException) as error:
        if verify and isinstance(error, MemoryError):  # its bytes are right: memory is full
            raise
        raise _unreadable(path, error) from error
    for column in there:
        if plain[column.name].null_count and not column.nullable:
            raise UserError(f"{path}: column {column.name} holds null; {_DAMAGED}")
    missing = {c.name: pa.nulls(loaded.num_rows, digests.ARROW_TYPES[c.kind]) for c in table.columns if c not in there}
    return pa.table({column.name: (plain | missing)[column.name] for column in table.columns})


def own_rows(rows: pd.DataFrame, recorded: Manifest) -> pd.DataFrame:
    """Return the rows of the iterations that the run computed itself; a fork copied the others from its origin."""
    return rows[rows["iteration"].isin(recorded.own_iterations)]


def to_frame(columns: Sequence[schema.Column], tables: Sequence[pa.Table]) -> pd.DataFrame:
    """Join the tables to one frame, bit for bit; null becomes NaN or None.

    Raises ValueError for a null in a column of a dtype that has no null in pandas.
    """
    rows = sum(table.num_rows for table in tables)
    series = {column.name: _to_series(column, tables) for column in columns}
    return pd.DataFrame(series, index=pd.RangeIndex(rows), columns=[column.name for column in columns])


def read_table(
    name: str,
    run_dir: Path | str,
    *,
    iterations: Sequence[int] | None = None,
    columns: Sequence[str] | None = None,
    allow_incomplete: bool = False,
    recorded: Manifest | None = None,
) -> pd.DataFrame:
    """Read the rows of some iterations of one table, bit for bit.

    Args:
        name: of the table, as in ppo_repro/records/README.md.
        iterations: from 0; the evaluation after N iterations has number N. None: all that were recorded.
        columns: names; None: all.
        allow_incomplete: read runs that are not complete.
        recorded: the manifest, for one of many reads: to read and check a long run's manifest takes tenths of a second.

    Raises:
        UserError: anything is missing, unknown or damaged.
    """
    folder = Path(run_dir)
    recorded = recorded or open_manifest(folder, allow_incomplete)
    wanted = None if iterations is None else _checked_iterations(folder, recorded, name, iterations)
    moments = (None, *range(recorded.num_iterations + 1)) if wanted is None else wanted
    files = [f for i in moments for f in manifest.recorded_at(recorded, i) if f.table.name == name]
    table = next((t for t in manifest.tables_of(recorded) if t.name == name), None)
    if table is None and not files:
        raise UserError(f"{folder}: no table '{name}'; there are {', '.join(manifest.table_names(recorded))}")
    chosen = _checked_columns(folder, table or files[0].table, columns)
    names = [column.name for column in chosen]
    return to_frame(chosen, [read_file(f.path(folder), f.table, f.entry).select(names) for f in files])


read_sequences = partial(read_table, "sequences")  # one row per response or fragment of an episode
read_tokens = partial(read_table, "tokens")  # one row per response token or environment step
read_updates = partial(read_table, "updates")  # one row per token, epoch and minibatch
read_steps = partial(read_table, "steps")  # one row per optimizer step
read_iterations = partial(read_table, "iterations")  # one row per iteration
read_evaluations = partial(read_table, "evaluations")  # one row per held-out prompt and evaluation


def _to_series(column: schema.Column, tables: Sequence[pa.Table]) -> Any:
    chunks = [chunk for table in tables for chunk in table.column(column.name).chunks]
    joined = pa.chunked_array(chunks, digests.ARROW_TYPES[column.kind])
    if column.kind == "string" or column.kind in digests.ELEMENTS:
        return joined.to_pandas()
    if joined.null_count and column.kind not in ("float32", "float64"):
        raise ValueError(f"column {column.name}: pandas has no null for {column.kind}")
    return joined.to_numpy()


def _checked_columns(run_dir: Path, table: schema.Table, columns: Sequence[str] | None) -> tuple[schema.Column, ...]:
    """Return the columns with these names; None stands for all. Raises UserError for an unknown name."""
    if columns is None:
        return table.columns
    by_name = {column.name: column for column in table.columns}
    if isinstance(columns, str):
        raise UserError(f"{run_dir}: columns = {columns!r}: must be a list of names")
    for index, name in enumerate(columns):
        if name not in by_name:
            raise UserError(f"{run_dir}: {table.name} has no column '{name}'; there are {', '.join(by_name)}")
        if name in columns[:index]:
            raise UserError(f"{run_dir}: column '{name}' is asked for twice; name it once")
    return tuple(by_name[name] for name in columns)


def _checked_iterations(run_dir: Path, recorded: Manifest, name: str, iterations: Sequence[int]) -> tuple[int, ...]:
    count = recorded.num_iterations + (name in recorded.ending)
    for index, iteration in enumerate(iterations):
        # 1.0 and True are equal to a number in the range
        if isinstance(iteration, bool | float) or iteration not in range(count):
            indices = f"0 to {count - 1}" if count else "none"
            raise UserError(f"{run_dir}: no iteration {iteration}; recorded are {indices}")
        if iteration in iterations[:index]:
            raise UserError(f"{run_dir}: iteration {iteration} is asked for twice; name it once")
    return tuple(int(iteration) for iteration in iterations)


def read_checked(path: Path, digest: str) -> bytes:
    """Return the content of a recorded file. Raises UserError unless its bytes have this SHA-256."""
    try:
        content = read_regular(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if manifest.content_digest(content) != digest:
        raise UserError(f"{path}: {_OTHER_BYTES}")
    return content


def check_file(path: Path, digest: str) -> None:
    """Raise UserError unless the bytes of a recorded file have this SHA-256."""
    try:
        if file_digest(path) != digest:
            raise UserError(f"{path}: {_OTHER_BYTES}")
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: BaseException) -> UserError:
    if isinstance(error, FileNotFoundError):
        return UserError(f"{path}: is missing; the manifest lists it, so it was removed")
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    return UserError(f"{path}: cannot be read ({reason}); the file was changed or damaged")
