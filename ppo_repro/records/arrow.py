"""Columns of arrays and lists to Arrow tables of a schema, and those to Parquet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ppo_repro.records import digests, schema


@dataclass(frozen=True)
class WithNulls:
    """An array of a nullable column: its values, and which of them are present."""

    values: npt.NDArray[Any]
    present: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Lists:
    """A list column in two arrays: the elements of all lists one after the other, and the length of each list."""

    elements: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]


@dataclass(frozen=True)
class AllNull:
    """A nullable column without a value."""

    rows: int


def arrow_schema(table: schema.Table, names: Sequence[str] | None = None) -> pa.Schema:
    """The Arrow schema of a table, or of the columns with these names; units and descriptions in the metadata."""
    fields = [
        pa.field(
            column.name,
            digests.ARROW_TYPES[column.kind],
            nullable=column.nullable,
            metadata={"unit": column.unit, "description": column.description},
        )
        for column in table.columns
        if names is None or column.name in names
    ]
    about = {
        "table": table.name,
        "grain": table.grain,
        "key": ",".join(table.key),
        "schema_version": str(schema.SCHEMA_VERSION),
    }
    return pa.schema(fields, metadata=about)


def to_arrow(
    table: schema.Table, columns: Mapping[str, npt.NDArray[Any] | Sequence[Any] | WithNulls | Lists | AllNull]
) -> pa.Table:
    """Build a table from a copy of its columns; raises ValueError naming table and column.

    A column that a level or a feature brings may be left out. No value is cast where that could change a bit.
    """
    strangers = columns.keys() - {column.name for column in table.columns}
    if strangers:
        raise ValueError(f"table {table.name}, column {min(strangers)}: not in the schema")
    arrays: list[pa.Array] = []
    for column in table.columns:
        if column.name not in columns:
            if not column.may_be_missing:
                raise ValueError(f"table {table.name}, column {column.name}: missing")
            continue
        try:
            array = _to_array(column, columns[column.name])
            if array.null_count and not column.nullable:
                raise ValueError("is not nullable")
            if arrays and len(array) != len(arrays[0]):
                raise ValueError(f"has {len(array)} rows, {table.columns[0].name} has {len(arrays[0])}")
        except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
            raise ValueError(f"table {table.name}, column {column.name}: {error}") from error
        arrays.append(array)
    result = pa.Table.from_arrays(arrays, schema=arrow_schema(table, list(columns)))
    result.validate(full=True)
    return result


def to_parquet(data: pa.Table) -> memoryview:
    """The content of the Parquet file, every bit of every value as in the table."""

    def of_types(*kinds: str) -> list[str]:
        return [field.name for field in data.schema if str(field.type) in kinds]

    sink = pa.BufferOutputStream()
    pq.write_table(
        data,
        sink,
        compression="zstd",
        # dictionaries and statistics compare floats by value: all NaNs are one, and zeros have no sign
        use_dictionary=of_types("string"),
        write_statistics=of_types("int32", "int64"),
        write_page_checksum=True,
    )
    return memoryview(sink.getvalue())


def _to_array(column: schema.Column, values: Any) -> pa.Array:
    kind, element = digests.ARROW_TYPES[column.kind], digests.ELEMENTS.get(column.kind)
    if isinstance(values, AllNull):
        return pa.nulls(values.rows, kind)
    if isinstance(values, WithNulls):
        return pa.array(_exact(column.kind, values.values), kind, mask=~values.present, from_pandas=False)
    if isinstance(values, Lists) and element is not None:
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values.lengths)])
        if offsets[-1] != len(values.elements):
            raise ValueError(f"holds {len(values.elements)} elements in lists of {offsets[-1]}")
        return pa.LargeListArray.from_arrays(offsets, _exact(element, values.elements)).cast(kind)
    if isinstance(values, np.ndarray):
        return pa.array(_exact(column.kind, values), kind, from_pandas=False)
    # Arrow would round or cut them silently
    there = [value for value in values if value is not None]
    if "float32" in column.kind and any(getattr(value, "dtype", None) != np.float32 for value in there):
        raise ValueError("holds other values than float32")
    rows = there if column.kind == "list<int32>" else [there] if "int" in column.kind else []
    if any(len(row) and np.asarray(row).dtype.kind not in "iu" for row in rows):
        raise ValueError("holds other values than whole numbers")
    return pa.array(values, kind)


def _exact(kind: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy, whose memory no later write can change; ValueError unless it is one column of this type."""
    if type(values) is not np.ndarray or values.dtype != np.dtype(kind) or values.ndim != 1:
        raise ValueError(f"is a {type(values).__name__} of {values.dtype}, shape {values.shape}; expected {kind}")
    return np.array(values, order="C", copy=True)
