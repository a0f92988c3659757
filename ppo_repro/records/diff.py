"""The first bit in which two recorded runs differ: table, iteration, column, row and both values."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ppo_repro.base.errors import UserError
from ppo_repro.records import digests, manifest, reader, schema
from ppo_repro.records.manifest import FinalResults, Manifest

ROWS = "(rows)"
RUN = "(run)"
ITERATIONS = "(iterations)"
FINAL = "(final)"
BEFORE = -1  # the iteration of a table that was recorded before the first one

_CONTEXT = 12


@dataclass(frozen=True)
class Difference:
    """The first cell that differs. `key` has the left run's key columns of this cell.

    `rows` is the number of compared rows. Three names mean more than a cell: column `(rows)` counts the rows of a
    table, table `(run)` counts the iterations, and table `(final)` has the results after the last iteration, one per
    column.
    """

    table: str
    iteration: int
    column: str
    row: int = 0
    key: dict[str, Any] = field(default_factory=dict)
    left: Any = None
    right: Any = None
    left_bits: str = ""
    right_bits: str = ""
    unequal_in_column: int = 1
    rows: int = 1

    def describe(self, in_left: str = "on the left", in_right: str = "on the right") -> str:
        """Describe the difference on one line. `in_left` and `in_right` say where the values are."""
        left, right = _shown(self.left, self.left_bits), _shown(self.right, self.right_bits)
        if isinstance(self.left, str | list) and isinstance(self.right, type(self.left)):
            left, right = _around_difference(self.left, self.right)
        values = f"{left} {in_left}, {right} {in_right}"
        if self.table == RUN:
            return f"number of iterations: {values}"
        if self.table == FINAL:
            return f"final result {self.column}: {values}"
        iteration = "" if self.iteration == BEFORE else f", iteration {self.iteration}"
        if self.column == ROWS:
            return f"table {self.table}{iteration}, number of rows: {values}"
        key = ", ".join(f"{name} {value!r}" for name, value in self.key.items() if name != "iteration")
        where = f"row {self.row}" + (f" ({key})" if key else "")
        return (
            f"table {self.table}{iteration}, column {self.column}, {where}: {values}; "
            f"{self.unequal_in_column} of {self.rows} rows differ in this column"
        )


def first_difference(left_dir: Path | str, right_dir: Path | str) -> Difference | None:
    """Find the first difference of two runs, complete or not, in the order of computation; None if they are equal.

    Raises UserError if a file is missing or damaged, because its content is not what the run computed.
    """
    left_root, right_root = Path(left_dir), Path(right_dir)
    left, right = manifest.load(left_root), manifest.load(right_root)
    if left.kind != right.kind:
        raise UserError(f"{left_dir} is a {left.kind} run, {right_dir} a {right.kind} run; compare runs of one kind")
    counts = left.num_iterations, right.num_iterations
    for iteration in (None, *range(min(counts))):
        computed = reader.read_moment(right_root, right, iteration)
        if difference := from_recorded(left_root, left, iteration, computed):
            return difference
    if difference := _count_difference(RUN, min(counts), ITERATIONS, *counts):
        return difference
    ending = reader.read_moment(right_root, right, counts[1])
    return from_recorded(left_root, left, counts[0], ending) or first_final_difference(left.final, right.final)


def from_recorded(
    run_dir: Path, recorded: Manifest, iteration: int | None, computed: Mapping[str, pa.Table]
) -> Difference | None:
    """Find the first cell in which computed tables differ from the recorded tables of the same moment.

    Args:
        iteration: None is the moment before the first iteration; the number of iterations is after the last one.

    Raises:
        UserError: the records are damaged.
    """
    left, moment = reader.read_moment(run_dir, recorded, iteration), BEFORE if iteration is None else iteration
    # a table that only one side has is no difference, because the configuration decides which side tables exist
    order = (*manifest.side_tables_of(recorded), *manifest.tables_of(recorded))
    tables = (table for table in order if table.name in left and table.name in computed)
    differences = (first_table_difference(t, left[t.name], computed[t.name], moment) for t in tables)
    return next(filter(None, differences), None)


def first_table_difference(table: schema.Table, left: pa.Table, right: pa.Table, iteration: int) -> Difference | None:
    """Find the lowest row of the first column whose bits differ, among the columns that both tables have.

    Args:
        iteration: for the report of the difference.

    Raises:
        ValueError: values do not have the schema's type.
    """
    if difference := _count_difference(table.name, iteration, ROWS, left.num_rows, right.num_rows):
        return difference
    for column in table.columns:
        left_column, right_column = _column(left, column), _column(right, column)
        if not column.is_result or left_column is None or right_column is None:
            continue
        rows = np.flatnonzero(_unequal(column.kind, left_column, right_column))
        if rows.size == 0:
            continue
        row = int(rows[0])
        return Difference(
            table=table.name,
            iteration=iteration,
            column=column.name,
            row=row,
            key={name: left.column(name)[row].as_py() for name in table.key},
            left=left_column[row].as_py(),
            right=right_column[row].as_py(),
            left_bits=_cell_bits(column.kind, left_column, row),
            right_bits=_cell_bits(column.kind, right_column, row),
            unequal_in_column=int(rows.size),
            rows=left.num_rows,
        )
    return None


def _column(data: pa.Table, column: schema.Column) -> pa.ChunkedArray | None:
    """Return a column, all null if the file lacks it; None if the run was allowed to leave it out and did."""
    if column.name in data.column_names:
        values = digests.plain(column.kind, data.column(column.name))
    else:
        values = digests.plain(column.kind, pa.nulls(data.num_rows, digests.ARROW_TYPES[column.kind]))
    # a column outside the fingerprint may be missing, or null in every row
    return values if column.in_fingerprint or values.null_count < data.num_rows else None


def _count_difference(table: str, iteration: int, column: str, left: int, right: int) -> Difference | None:
    """Return the difference between two numbers of rows or iterations; None if the numbers are equal."""
    if left == right:
        return None
    row, rows, unequal = min(left, right), max(left, right), abs(left - right)
    return Difference(table, iteration, column, row, left=left, right=right, unequal_in_column=unequal, rows=rows)


def first_final_difference(left: FinalResults, right: FinalResults) -> Difference | None:
    """Find the first result after the last iteration whose bits differ, in the order in which they were computed."""
    for name in dict.fromkeys([*left, *right]):
        a, b = left.get(name), right.get(name)
        if a is None or b is None or digests.scalar_digest(a) != digests.scalar_digest(b):
            bits = _scalar_bits(a), _scalar_bits(b)
            return Difference(FINAL, -1, name, left=a, right=b, left_bits=bits[0], right_bits=bits[1])
    return None


def _unequal(kind: str, left: pa.ChunkedArray, right: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    if kind == "string":
        values = pc.not_equal(pc.fill_null(left, ""), pc.fill_null(right, "")).to_numpy()
    elif kind in digests.ELEMENTS:
        values = _unequal_lists(digests.ELEMENTS[kind], left, right)
    else:
        values = digests.raw_values(kind, left) != digests.raw_values(kind, right)
    validity = left.is_valid().to_numpy() != right.is_valid().to_numpy()
    return np.asarray(values, dtype=np.bool_) | np.asarray(validity, dtype=np.bool_)


def _unequal_lists(element: str, left: pa.ChunkedArray, right: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    left_lengths, right_lengths = digests.list_lengths(left), digests.list_lengths(right)
    unequal = left_lengths != right_lengths
    # only lists of one length have elements side by side
    rows = np.flatnonzero(~unequal)
    elements = [
        digests.raw_values(element, pc.list_flatten(column))[np.repeat(~unequal, lengths)]
        for column, lengths in ((left, left_lengths), (right, right_lengths))
    ]
    owners = np.repeat(rows, left_lengths[rows])
    unequal[owners[elements[0] != elements[1]]] = True
    return unequal


def _cell_bits(kind: str, column: pa.ChunkedArray, row: int) -> str:
    if kind in ("bool", "string", *digests.ELEMENTS) or not column[row].is_valid:
        return ""
    value = digests.raw_values(kind, column.slice(row, 1))
    return f"{int(value[0]):0{2 * value.dtype.itemsize}x}"


def _scalar_bits(value: float | int | str | None) -> str:
    return struct.pack(">d", value).hex() if isinstance(value, float) else ""


def _shown(value: Any, bits: str) -> str:
    if value is None:
        return "nothing"
    return f"{value!r} (bits {bits})" if bits and isinstance(value, float) else repr(value)


def _around_difference(left: str | list[Any], right: str | list[Any]) -> tuple[str, str]:
    # two long texts in full would hide the one position at which they differ
    pairs = enumerate(zip(left, right, strict=False))
    # compared as text, because 0.0 equals -0.0, and a NaN does not equal itself
    first = next((index for index, (a, b) in pairs if repr(a) != repr(b)), min(len(left), len(right)))
    start = max(0, first - _CONTEXT)
    windows = []
    for value in (left, right):
        shown = repr(value[start : first + _CONTEXT])
        before, after = ("..." if start else ""), ("..." if first + _CONTEXT < len(value) else "")
        windows.append(f"{before}{shown}{after}")
    return f"{windows[0]} (at {first})", f"{windows[1]} (at {first})"
