"""Recorded runs as pandas frames, checked against their manifest. Never imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ppo_repro.errors import UserError
from ppo_repro.files import file_digest
from ppo_repro.records import digests, manifest, schema
from ppo_repro.records.iteration_log import TableEntry
from ppo_repro.records.manifest import Manifest

_DAMAGED = "does not match the manifest; the file was changed or damaged"
_OTHER_BYTES = "has another SHA-256 than when it was written; the file was changed or damaged"
# what Arrow raises on damage depends on where the damage lies
_READ_ERRORS = (OSError, ValueError, MemoryError, pa.ArrowException)
Verification = Literal["contents", "pages"]


def open_manifest(run_dir: Path | str, allow_incomplete: bool = False) -> Manifest:
    """The manifest of a run; raises UserError where it is damaged, or incomplete and that is not allowed."""
    recorded = manifest.load(Path(run_dir))
    if recorded.status != "complete" and not allow_incomplete:
        raise UserError(
            f"{run_dir}: the run is {recorded.status} after {len(recorded.iterations)} recorded iterations; "
            f"finish it with `ppo-repro resume {run_dir}`, or allow incomplete runs"
        )
    return recorded


def read_arrow(run_dir: Path | str, table_name: str, iteration: int, verify: bool = True) -> pa.Table:
    """One recorded table in the schema's plain types; raises UserError where it is missing or damaged."""
    folder = Path(run_dir)
    recorded = manifest.load(folder)
    table = _table(folder, recorded, table_name)
    _checked_iterations(folder, recorded, (iteration,))
    return read_recorded(folder, recorded, table, iteration, verify)


def read_recorded(run_dir: Path, recorded: Manifest, table: schema.Table, iteration: int, verify: bool) -> pa.Table:
    """`read_arrow` with the manifest at hand, for many files of one run; raises UserError as that does."""
    entry = recorded.iterations[iteration]
    path = manifest.recorded_path(run_dir, table.name, entry)
    return read_file(path, table, entry.tables[table.name], verify, entry.row_group)


def read_file(
    path: Path, table: schema.Table, entry: TableEntry, verify: bool, row_group: int | None = None
) -> pa.Table:
    """One file of any table, or a row group of it; UserError where it is missing or damaged.

    `verify`: first the bytes of the file, then its values, against their digests.
    """
    loaded = _load_parquet(path, verify, entry.file_digest, row_group)
    written = schema.as_digested(table, loaded.column_names)
    data = _to_plain(path, written.columns, loaded)
    if verify and (data.num_rows != entry.rows or digests.table_digest(written, data) != entry.digest):
        raise UserError(f"{path}: {_DAMAGED}")
    return _to_plain(path, table.columns, data.select([c.name for c in table.columns if c in written.columns]))


def to_frame(columns: Sequence[schema.Column], tables: Sequence[pa.Table]) -> pd.DataFrame:
    """The tables one after the other, bit for bit; null becomes NaN or None. ValueError where pandas has no null."""
    rows = sum(table.num_rows for table in tables)
    series = {column.name: _to_series(column, tables) for column in columns}
    return pd.DataFrame(series, index=pd.RangeIndex(rows), columns=[column.name for column in columns])


@dataclass(frozen=True)
class TableReader:
    """Reads one table of a run; raises UserError on anything missing, unknown or damaged."""

    table_name: str

    def __call__(
        self,
        run_dir: Path | str,
        *,
        iterations: Sequence[int] | None = None,
        columns: Sequence[str] | None = None,
        verify: bool = True,
        allow_incomplete: bool = False,
    ) -> pd.DataFrame:
        """The rows of some iterations, of all by default; `verify` compares them with the digests of the manifest."""
        folder = Path(run_dir)
        recorded = open_manifest(folder, allow_incomplete)
        table = _table(folder, recorded, self.table_name)
        chosen_columns = checked_columns(folder, table, columns)
        chosen = _checked_iterations(folder, recorded, iterations)
        names = [column.name for column in chosen_columns]
        tables = [read_recorded(folder, recorded, table, iteration, verify).select(names) for iteration in chosen]
        return to_frame(chosen_columns, tables)


read_sequences = TableReader("sequences")  # one row per response or fragment of an episode
read_tokens = TableReader("tokens")  # one row per response token or environment step
read_updates = TableReader("updates")  # one row per token, epoch and minibatch
read_steps = TableReader("steps")  # one row per optimizer step
read_iterations = TableReader("iterations")  # one row per iteration


def stream(
    run_dir: Path | str,
    table_name: str,
    *,
    columns: Sequence[str],
    iterations: Sequence[int] | None = None,
    rows: int = 1 << 18,
    verify: Verification = "contents",
    allow_incomplete: bool = False,
) -> Iterator[pd.DataFrame]:
    """The rows in their order, at most `rows` at a time and of one iteration each, with only `columns` in the frame.

    `verify` chooses what is promised before a row is handed out, and what that costs:

    - "contents": the digest of the manifest. All columns are read for it, and one iteration is held in memory.
    - "pages": the digest of the bytes of a file, which is read once for it, in pieces. Then only `columns` are read,
      and memory is bounded by one batch however large the file is. Runs of manifest version 2 and older have no such
      digest: there it is the checksum of every page that is read, the column types, the row count and the nulls;
      another valid file in its place goes unnoticed, and so may damage outside the pages.

    Raises UserError on anything missing, unknown or damaged. What needs no row is checked before the first one.
    """
    folder = Path(run_dir)
    if rows < 1 or verify not in ("contents", "pages"):
        raise UserError(f"{run_dir}: rows = {rows}, verify = {verify!r}: rows is at least 1, verify contents or pages")
    recorded = open_manifest(folder, allow_incomplete)
    table = _table(folder, recorded, table_name)
    chosen = checked_columns(folder, table, columns)
    wanted = _checked_iterations(folder, recorded, iterations)
    return _batches(folder, recorded, table, chosen, wanted, rows, verify)


def _batches(
    run_dir: Path,
    recorded: Manifest,
    table: schema.Table,
    columns: tuple[schema.Column, ...],
    iterations: tuple[int, ...],
    rows: int,
    verify: Verification,
) -> Iterator[pd.DataFrame]:
    names = [column.name for column in columns]
    for iteration in iterations:
        if verify == "contents":
            data = read_recorded(run_dir, recorded, table, iteration, True).select(names)
            for start in range(0, data.num_rows, rows):
                yield to_frame(columns, [data.slice(start, rows)])
        else:
            yield from (
                to_frame(columns, [page]) for page in _pages(run_dir, recorded, table, columns, iteration, rows)
            )


def _pages(
    run_dir: Path,
    recorded: Manifest,
    table: schema.Table,
    columns: tuple[schema.Column, ...],
    iteration: int,
    rows: int,
) -> Iterator[pa.Table]:
    entry = recorded.iterations[iteration]
    path, remaining = manifest.recorded_path(run_dir, table.name, entry), entry.tables[table.name].rows
    check_file(path, entry.tables[table.name].file_digest)
    try:
        # a buffer makes Arrow read page by page; without one it reads the column of a whole row group
        file = pq.ParquetFile(path, page_checksum_verification=True, buffer_size=1 << 16)
        layout = file.schema_arrow.empty_table()
    except _READ_ERRORS as error:
        raise _unreadable(path, error) from error
    _to_plain(path, schema.with_retired(table, layout.column_names).columns, layout)
    names = [column.name for column in columns if column.name in layout.column_names]
    with file:
        groups = range(file.num_row_groups) if entry.row_group is None else [entry.row_group]
        if sum(file.metadata.row_group(group).num_rows for group in groups) != remaining:
            raise UserError(f"{path}: {_DAMAGED}")
        batches = file.iter_batches(batch_size=rows, columns=names, row_groups=list(groups))
        while remaining:
            try:
                # a damaged page header ends a column early
                if (batch := next(batches, None)) is None:
                    raise UserError(f"{path}: {_DAMAGED}")
                batch.validate(full=True)
                remaining -= batch.num_rows
            except _READ_ERRORS as error:
                raise _unreadable(path, error) from error
            # Arrow returns the columns in the order of the file
            yield _to_plain(path, columns, pa.Table.from_batches([batch]).select(names))


def _table(run_dir: Path, recorded: Manifest, table_name: str) -> schema.Table:
    tables = {table.name: table for table in manifest.tables_of(recorded)}
    if table_name not in tables:
        raise UserError(f"{run_dir}: no table '{table_name}'; there are {', '.join(tables)}")
    return tables[table_name]


def _to_series(column: schema.Column, tables: Sequence[pa.Table]) -> Any:
    chunks = [chunk for table in tables for chunk in table.column(column.name).chunks]
    joined = pa.chunked_array(chunks, digests.ARROW_TYPES[column.kind])
    if column.kind == "string" or column.kind in digests.ELEMENTS:
        return joined.to_pandas()
    if joined.null_count and column.kind not in ("float32", "float64"):
        raise ValueError(f"column {column.name}: pandas has no null for {column.kind}")
    return joined.to_numpy()


def checked_columns(run_dir: Path, table: schema.Table, columns: Sequence[str] | None) -> tuple[schema.Column, ...]:
    """The columns with these names, all by default; raises UserError on an unknown name."""
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


def _checked_iterations(run_dir: Path, recorded: Manifest, iterations: Sequence[int] | None) -> tuple[int, ...]:
    count = len(recorded.iterations)
    if iterations is None:
        return tuple(range(count))
    for index, iteration in enumerate(iterations):
        # 1.0 and True are equal to a number in the range
        if isinstance(iteration, bool | float) or iteration not in range(count):
            indices = f"0 to {count - 1}" if count else "none"
            raise UserError(f"{run_dir}: no iteration {iteration}; recorded are {indices}")
        if iteration in iterations[:index]:
            raise UserError(f"{run_dir}: iteration {iteration} is asked for twice; name it once")
    return tuple(int(iteration) for iteration in iterations)


def check_file(path: Path, digest: str | None) -> None:
    """Raise UserError unless the bytes of a recorded file have this SHA-256; None: an earlier version noted none."""
    try:
        if digest is not None and file_digest(path) != digest:
            raise UserError(f"{path}: {_OTHER_BYTES}")
    except OSError as error:
        raise _unreadable(path, error) from error


def _load_parquet(path: Path, verify: bool, digest: str | None, row_group: int | None) -> pa.Table:
    try:
        # as a file: a data set would make columns of folder names such as seed=1
        with path.open("rb") as file:
            content = file.read(os.fstat(file.fileno()).st_size)
        if verify and digest is not None and manifest.content_digest(content) != digest:
            raise UserError(f"{path}: {_OTHER_BYTES}")
        source = pa.py_buffer(content)
        # without a digest of the bytes, checksums are all there is for the timings
        parquet = pq.ParquetFile(pa.BufferReader(source), page_checksum_verification=verify)
        data = parquet.read() if row_group is None else parquet.read_row_group(row_group)
        data.validate(full=True)
    except _READ_ERRORS as error:
        raise _unreadable(path, error) from error
    return data


def _unreadable(path: Path, error: BaseException) -> UserError:
    if isinstance(error, FileNotFoundError):
        return UserError(f"{path}: is missing; the manifest lists it, so it was removed")
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    return UserError(f"{path}: cannot be read ({reason}); the file was changed or damaged")


def _to_plain(path: Path, columns: Sequence[schema.Column], data: pa.Table) -> pa.Table:
    there = set(data.column_names)
    if data.column_names != [column.name for column in columns if column.name in there or not column.may_be_missing]:
        raise UserError(f"{path}: has columns {', '.join(data.column_names)}; {_DAMAGED}")
    arrays = []
    for column in columns:
        if column.name not in there:
            arrays.append(pa.chunked_array([pa.nulls(data.num_rows, digests.ARROW_TYPES[column.kind])]))
            continue
        try:
            array = digests.plain(column.kind, data.column(column.name))
        except ValueError as error:
            raise UserError(f"{path}: column {column.name} {error}; {_DAMAGED}") from error
        if array.null_count and not column.nullable:
            raise UserError(f"{path}: column {column.name} holds null; {_DAMAGED}")
        arrays.append(array)
    return pa.Table.from_arrays(arrays, names=[column.name for column in columns])
