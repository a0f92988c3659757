"""Convert arrays and lists to Arrow tables of a schema, and Arrow tables to Parquet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ppo_repro.config.layout import RecordLevel
from ppo_repro.records import digests, schema
from ppo_repro.records.schema import includes


def to_arrow(
    table: schema.Table,
    columns: Mapping[str, npt.NDArray[Any] | Sequence[Any] | pa.Array | None],
    level: RecordLevel = "deep",
) -> pa.Table:
    """Build a table from a copy of its columns. A column that is None is null in every row.

    Columns above `level` are left out, and columns of a feature that are None. No value is cast if the cast could
    change a bit. Raises ValueError, naming table and column.
    """
    if unknown := columns.keys() - {column.name for column in table.columns}:
        raise ValueError(f"table {table.name}, column {min(unknown)}: not in the schema")
    recorded = [column for column in table.columns if includes(level, column.level)]
    if missing := [column.name for column in recorded if column.name not in columns]:
        raise ValueError(f"table {table.name}, column {missing[0]}: missing")
    recorded = [column for column in recorded if column.only_with is None or columns[column.name] is not None]
    arrays: list[pa.Array] = []
    for column in recorded:
        try:
            array = _to_array(column, columns[column.name], len(arrays[0]) if arrays else 0)
            if array.null_count and not column.nullable:
                raise ValueError("is not nullable")
            if arrays and len(array) != len(arrays[0]):
                raise ValueError(f"has {len(array)} rows, {table.columns[0].name} has {len(arrays[0])}")
        except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
            raise ValueError(f"table {table.name}, column {column.name}: {error}") from error
        arrays.append(array)
    fields = [
        pa.field(
            column.name,
            digests.ARROW_TYPES[column.kind],
            nullable=column.nullable,
            metadata={"unit": column.unit, "description": column.about},
        )
        for column in recorded
    ]
    about = {"table": table.name, "grain": table.grain, "key": ",".join(table.key)}
    about["schema_version"] = str(schema.SCHEMA_VERSION)
    result = pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=about))
    result.validate(full=True)
    return result


def to_parquet(data: pa.Table) -> memoryview:
    """Return the content of a Parquet file with every bit of every value of the table."""
    texts = [field.name for field in data.schema if pa.types.is_string(field.type)]
    whole = [field.name for field in data.schema if pa.types.is_integer(field.type)]
    sink = pa.BufferOutputStream()
    pq.write_table(
        data,
        sink,
        compression="zstd",
        # not for floats: dictionaries and statistics would lose the bits of NaNs and the sign of zeros
        use_dictionary=texts,
        write_statistics=whole,
        write_page_checksum=True,
    )
    return memoryview(sink.getvalue())


def _to_array(column: schema.Column, values: Any, rows: int) -> pa.Array:
    """Return an array of the column's type, whose memory no later write can change.

    Raises ValueError if the values are of another type.
    """
    expected = digests.ARROW_TYPES[column.kind]
    if values is None:
        return pa.nulls(rows, expected)
    if type(values) is np.ndarray:
        values = values.copy()
    array = values if isinstance(values, pa.Array) else pa.array(values)
    element, wanted = array.type, expected
    if pa.types.is_list(element) and pa.types.is_list(wanted):
        element, wanted = element.value_type, wanted.value_type
    whole = pa.types.is_integer(element) and (pa.types.is_integer(wanted) or wanted == pa.float64())
    if element != wanted and not whole and not pa.types.is_null(element):
        raise ValueError(f"holds {array.type}, expected {column.kind}")
    return array.cast(expected)  # of whole numbers it refuses what it would change
