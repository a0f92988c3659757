"""SHA-256 over column values in row order, never over file bytes.

Another Parquet or Arrow version, chunking, dictionary encoding or compression gives the same digest. Another bit of a
value, another row order or another column name gives another digest.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ppo_repro.records import schema

ARROW_TYPES: dict[str, pa.DataType] = {
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "string": pa.string(),
    "list<int32>": pa.list_(pa.int32()),
    "list<float32>": pa.list_(pa.float32()),
    "list<float64>": pa.list_(pa.float64()),
}
# kind of the elements in lists of a kind
ELEMENTS = {"list<int32>": "int32", "list<float32>": "float32", "list<float64>": "float64"}

# part of every digest, so that another way to digest, or another schema, gives other fingerprints
_FORMAT = f"ppo_repro digests 1, schema {schema.SCHEMA_VERSION}"
FINGERPRINT_SEED: str = hashlib.sha256(_FORMAT.encode()).hexdigest()


def plain(kind: str, array: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray:
    """Convert values to the Arrow type of `kind`. Raises ValueError if they are of another kind."""
    chunked = array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])
    if pa.types.is_dictionary(chunked.type):
        chunked = chunked.cast(chunked.type.value_type)
    stored, expected = chunked.type, ARROW_TYPES[kind]
    texts = pa.types.is_large_string(stored) or pa.types.is_string_view(stored)
    lists = pa.types.is_large_list(stored) or pa.types.is_fixed_size_list(stored) or pa.types.is_list(stored)
    if stored == expected:
        return chunked
    if (kind == "string" and texts) or (kind in ELEMENTS and lists and stored.value_type == expected.value_type):
        return chunked.cast(expected)
    raise ValueError(f"holds {stored}, expected {kind}")


def raw_values(kind: str, array: pa.ChunkedArray | pa.Array) -> npt.NDArray[Any]:
    """Return fixed-width values as unsigned integers of the same bits, null as zero.

    Raises ValueError for other kinds.
    """
    if kind == "string" or kind in ELEMENTS:
        raise ValueError(f"{kind} has no fixed width")
    chunks = [_bits(chunk) for chunk in plain(kind, array).chunks]
    width = 1 if kind == "bool" else ARROW_TYPES[kind].bit_width // 8
    return np.concatenate([np.empty(0, dtype=f"<u{width}"), *chunks])


def list_lengths(array: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Return the length of each list, zero for null."""
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    return np.asarray(lengths, dtype=np.int64)


def column_digest(kind: str, array: pa.ChunkedArray | pa.Array, *, nullable: bool = False) -> bytes:
    """Return the digest of one column's values in row order.

    Raises ValueError if the values are not of `kind`, or if one is null and not `nullable`.
    """
    column = plain(kind, array)
    if column.null_count and not nullable:
        raise ValueError(f"holds {column.null_count} null values; the column is not nullable")
    digest = hashlib.sha256(_framed(_FORMAT, kind) + struct.pack("<q?", len(column), nullable))
    if nullable:
        for chunk in column.chunks:
            digest.update(chunk.is_valid().cast(pa.uint8()).to_numpy())
    for piece in _value_bytes(kind, column):
        digest.update(piece)
    return digest.digest()


def table_digest(table: schema.Table, data: pa.Table) -> str:
    """Return the hex digest of the columns that are results. Raises ValueError, naming table and column."""
    names = [c.name for c in table.columns if c.name in data.column_names or not c.may_be_missing]
    if sorted(data.column_names) != sorted(names):
        raise ValueError(f"table {table.name}: has columns {data.column_names}, expected {names}")
    digest = hashlib.sha256(_framed(_FORMAT, table.name))
    for column in table.columns:
        if column.in_fingerprint and column.name in names:
            try:
                value = column_digest(column.kind, data.column(column.name), nullable=column.nullable)
            except ValueError as error:
                raise ValueError(f"table {table.name}, column {column.name}: {error}") from error
            digest.update(_framed(column.name) + value)
    return digest.hexdigest()


def scalar_digest(value: float | int | str) -> str:
    """Return the hex digest of one result; 1, 1.0 and '1' differ, and so do 0.0 and -0.0. Every NaN is the same."""
    if isinstance(value, str):
        content = _framed("str", value)
    elif isinstance(value, float):
        # the manifest is JSON, which keeps no NaN payload
        content = _framed("float") + struct.pack("<d", math.nan if math.isnan(value) else value)
    else:
        content = _framed("int", str(value))
    return hashlib.sha256(content).hexdigest()


def chain(previous: str, digests: Mapping[str, str]) -> str:
    """Return the link after `previous`: the hex digest of `previous` and the named digests, sorted by name."""
    content = _framed(previous) + b"".join(_framed(name, digests[name]) for name in sorted(digests))
    return hashlib.sha256(content).hexdigest()


def _framed(*texts: str) -> bytes:
    # each with its length, so that different sequences of texts give different bytes
    encoded = [text.encode() for text in texts]
    return b"".join(struct.pack("<q", len(item)) + item for item in encoded)


def _bits(chunk: pa.Array) -> npt.NDArray[Any]:
    if pa.types.is_boolean(chunk.type):
        return np.asarray(chunk.fill_null(False).to_numpy(zero_copy_only=False), dtype=np.uint8)
    values = chunk.fill_null(0).to_numpy()
    width = values.dtype.itemsize
    return np.asarray(values.view(f"u{width}"), dtype=f"<u{width}")


def _value_bytes(kind: str, column: pa.ChunkedArray) -> Iterator[Any]:
    if kind == "string":
        # all lengths come before all text, so that the borders of chunks do not matter
        texts = [text.encode() for text in pc.fill_null(column, "").to_pylist()]
        yield np.array([len(text) for text in texts], dtype="<i8")
        yield b"".join(texts)
    elif kind in ELEMENTS:
        yield list_lengths(column).astype("<i8")
        for chunk in column.chunks:
            values = chunk.flatten()
            if values.null_count:
                raise ValueError(f"holds {values.null_count} null list elements")
            yield _bits(values)
    else:
        for chunk in column.chunks:
            yield _bits(chunk)
