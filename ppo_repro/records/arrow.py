"""Columns of arrays and lists to Arrow tables of a schema, and those to Parquet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ppo_repro.records import digests, schema

# a Python float would be rounded silently to float32
_SCALARS: dict[str, tuple[type, ...]] = {
    "int32": (int, np.int32),
    "int64": (int, np.int64),
    "float32": (np.float32,),
    "float64": (float, np.float64),
    "bool": (bool, np.bool_),
}


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


def arrow_schema(table: schema.Table) -> pa.Schema:
    """The Arrow schema of a table, units and descriptions in the field metadata."""
    fields = [
        pa.field(
            column.name,
            digests.ARROW_TYPES[column.kind],
            nullable=column.nullable,
            metadata={"unit": column.unit, "description": column.description},
        )
        for column in table.columns
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
    """Build the table from a copy of exactly its columns; raises ValueError naming table and column."""
    names = [column.name for column in table.columns]
    for name in [*names, *columns]:
        if name not in columns:
            raise ValueError(f"table {table.name}, column {name}: missing")
        if name not in names:
            raise ValueError(f"table {table.name}, column {name}: not in the schema")
    arrays = []
    for column in table.columns:
        try:
            arrays.append(_to_array(column, columns[column.name]))
        except (ValueError, OverflowError) as error:
            raise ValueError(f"table {table.name}, column {column.name}: {error}") from error
        if len(arrays[-1]) != len(arrays[0]):
            raise ValueError(
                f"table {table.name}, column {column.name}: has {len(arrays[-1])} rows, {names[0]} has {len(arrays[0])}"
            )
    result = pa.Table.from_arrays(arrays, schema=arrow_schema(table))
    result.validate(full=True)
    return result


def column_of(data: pa.Table, column: schema.Column) -> pa.ChunkedArray | pa.Array:
    """The values of a column; null in every row where a run lacks it, as one without turns those of turns."""
    if column.name in data.column_names:
        return data.column(column.name)
    return pa.nulls(data.num_rows, digests.ARROW_TYPES[column.kind])


def to_parquet(table: schema.Table, *iterations: pa.Table) -> memoryview:
    """The content of the Parquet file, every bit of every value as in the tables: of several each is one row group."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        iterations[0].schema,
        compression="zstd",
        # dictionaries and statistics compare floats by value: all NaNs are one, and zeros have no sign
        use_dictionary=[column.name for column in table.columns if column.kind == "string"],
        write_statistics=[column.name for column in table.columns if column.kind in ("int32", "int64")],
        write_page_checksum=True,
    ) as file:
        for data in iterations:
            file.write_table(data, None if len(iterations) == 1 else max(1, data.num_rows))
    return memoryview(sink.getvalue())


def _to_array(column: schema.Column, values: Any) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, AllNull):
        if not column.nullable:
            raise ValueError("is not nullable")
        return pa.nulls(values.rows, digests.ARROW_TYPES[column.kind])
    if column.kind in _SCALARS:
        if isinstance(values, WithNulls):
            return _with_nulls(column, values)
        if isinstance(values, np.ndarray):
            return _from_numpy(column, values)
        return _from_scalars(column, values)
    if column.kind == "string":
        _require_items(values, (str, NoneType) if column.nullable else (str,), column)
        return pa.array(values, pa.string())
    return _from_two_arrays(column, values) if isinstance(values, Lists) else _from_lists(column, values)


def _from_numpy(column: schema.Column, values: npt.NDArray[Any]) -> pa.Array:
    dtype = np.dtype(column.kind)
    # a masked array is an ndarray too and would lose its mask
    if type(values) is not np.ndarray or values.dtype != dtype or values.ndim != 1:
        actual = f"{type(values).__name__} of {values.dtype} with shape {values.shape}"
        raise ValueError(f"is a {actual}, expected a one-dimensional array of {column.kind}")
    # Arrow would share the memory, and later writes to the array would change the record
    copied = np.array(values, order="C", copy=True)
    return pa.array(copied, digests.ARROW_TYPES[column.kind], from_pandas=False)


def _with_nulls(column: schema.Column, values: WithNulls) -> pa.Array:
    if not column.nullable:
        raise ValueError("is not nullable")
    if values.present.dtype != np.bool_ or values.present.shape != values.values.shape:
        raise ValueError(
            f"has {values.values.shape} values and says of {values.present.shape} whether they are present"
        )
    plain = _from_numpy(column, values.values)
    validity = pa.array(values.present, pa.bool_()).buffers()[1]
    return pa.Array.from_buffers(plain.type, len(plain), [validity, plain.buffers()[1]])


def _from_scalars(column: schema.Column, values: Any) -> pa.Array:
    allowed = _SCALARS[column.kind]
    _require_items(values, (*allowed, NoneType) if column.nullable else allowed, column)
    is_null = np.array([value is None for value in values], dtype=bool)
    filled = np.array([0 if value is None else value for value in values], dtype=column.kind)
    return pa.array(filled, digests.ARROW_TYPES[column.kind], mask=is_null, from_pandas=False)


def _from_lists(column: schema.Column, values: Any) -> pa.Array:
    allowed = (np.ndarray, list, tuple)
    _require_items(values, (*allowed, NoneType) if column.nullable else allowed, column)
    element = digests.ELEMENTS[column.kind]
    rows = []
    for value in values:
        if value is None:
            value = np.empty(0, dtype=element)
        if not isinstance(value, np.ndarray):
            _require_items(value, _SCALARS[element], column)
            value = np.array(value, dtype=element)
        if type(value) is not np.ndarray or value.dtype != element or value.ndim != 1:
            raise ValueError(f"holds {value.dtype} of shape {value.shape} where {element} lists belong")
        rows.append(value)
    flat = np.concatenate([np.empty(0, dtype=element), *rows])
    is_null = np.array([value is None for value in values], dtype=bool)
    return _list_array(column, flat, np.array([len(row) for row in rows], dtype=np.int64), is_null)


def _from_two_arrays(column: schema.Column, values: Lists) -> pa.Array:
    if values.elements.dtype != digests.ELEMENTS[column.kind] or values.elements.shape != (values.lengths.sum(),):
        raise ValueError(
            f"holds {values.elements.dtype} of shape {values.elements.shape} in lists of {values.lengths.sum()} "
            f"{digests.ELEMENTS[column.kind]} elements"
        )
    # Arrow would share the memory, and later writes to the array would change the record
    return _list_array(column, values.elements.copy(), values.lengths, np.zeros(len(values.lengths), dtype=bool))


def _list_array(
    column: schema.Column,
    elements: npt.NDArray[Any],
    lengths: npt.NDArray[np.int64],
    is_null: npt.NDArray[np.bool_],
) -> pa.Array:
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    mask = pa.array(is_null) if column.nullable else None
    return pa.LargeListArray.from_arrays(offsets, elements, mask=mask).cast(digests.ARROW_TYPES[column.kind])


def _require_items(values: Any, allowed: tuple[type, ...], column: schema.Column) -> None:
    if not isinstance(values, list | tuple):
        raise ValueError(f"is a {type(values).__name__}, expected a list for {column.kind}")
    strangers = {type(value).__name__ for value in values if type(value) not in allowed}
    if strangers:
        raise ValueError(f"holds {', '.join(sorted(strangers))} where {column.kind} values belong")
