"""Digests see every bit, row order and names, and nothing of how the values are stored."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.records import arrow, digests, schema
from tests.support import synthetic_run
from tests.support.synthetic_run import hard_values, one_column, values_of, with_nulls

KINDS = list(digests.ARROW_TYPES)

PINNED = {
    "int32": "25de40dd664e",
    "int64": "721d629de996",
    "float32": "7384058fab8f",
    "float64": "936cfd51d0a3",
    "bool": "b4be618238c1",
    "string": "7c53a62ad573",
    "list<int32>": "9254d4e30b98",
    "list<float32>": "d33422e74df2",
    "list<float64>": "7f8b5455ec17",
}
PINNED_WITH_NULLS = {"float32": "242fc6a18656", "float64": "ae0b406c7434", "string": "5a1adc91f7fb"}
PINNED_CHAIN = "7188bf0c6b6a"


def array_of(kind: str, values: Any) -> pa.ChunkedArray:
    return arrow.to_arrow(one_column(kind), {"c": values}).column("c")


def nullable_arrow(kind: str, values: Any, present: npt.NDArray[np.bool_]) -> pa.ChunkedArray:
    return arrow.to_arrow(one_column(kind, nullable=True), {"c": with_nulls(kind, values, present)}).column("c")


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_digest_ignores_the_encoding(kind: str, data: st.DataObject) -> None:
    column = array_of(kind, data.draw(values_of(kind)))
    digest = digests.column_digest(kind, column)
    cut = data.draw(st.integers(0, len(column)))
    chunks = [*column.slice(0, cut).chunks, *column.slice(cut).chunks]
    assert digests.column_digest(kind, pa.chunked_array(chunks, column.type)) == digest
    padded = pa.concat_arrays([*column.slice(0, 1).chunks, *column.chunks, pa.array([], column.type)])
    assert digests.column_digest(kind, padded.slice(min(1, len(column)))) == digest
    # a dictionary of floats would merge NaNs before any digest is taken
    if kind in ("string", "int32", "int64"):
        assert digests.column_digest(kind, column.dictionary_encode()) == digest
    wider = {
        "string": pa.large_string(),
        "list<int32>": pa.large_list(pa.int32()),
        "list<float32>": pa.large_list(pa.float32()),
        "list<float64>": pa.large_list(pa.float64()),
    }.get(kind)
    if wider is not None:
        assert digests.column_digest(kind, column.cast(wider)) == digest
    size, codec = data.draw(st.integers(1, 5)), data.draw(st.sampled_from(["none", "snappy", "zstd"]))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"c": column}), sink, use_dictionary=False, row_group_size=size, compression=codec)
    stored = pq.ParquetFile(pa.BufferReader(sink.getvalue())).read().column("c")
    assert digests.column_digest(kind, stored) == digest


def test_table_digest_sees_names_order_and_results_only() -> None:
    table = schema.ITERATIONS
    data = synthetic_run.random_tables(0, 6)["iterations"]
    digest = digests.table_digest(table, data)
    order = list(reversed(data.column_names))
    assert digests.table_digest(table, data.select(order)) == digest
    assert digests.table_digest(table, data.take([1, 0, 2, 3, 4, 5])) != digest
    renamed = dataclasses.replace(table.columns[5], name="score")
    other = dataclasses.replace(table, columns=(*table.columns[:5], renamed, *table.columns[6:]))
    assert digests.table_digest(other, data.rename_columns([c.name for c in other.columns])) != digest
    for column in table.columns:
        nothing = pa.array(np.zeros(6, dtype=column.kind) + 3)
        changed = data.set_column(data.column_names.index(column.name), column.name, nothing)
        assert (digests.table_digest(table, changed) == digest) == (not column.in_fingerprint)
    with pytest.raises(ValueError, match="table iterations: has columns"):
        digests.table_digest(table, data.drop_columns(["tokens"]))
    with pytest.raises(ValueError, match="column tokens: holds double, expected int32"):
        digests.table_digest(table, data.set_column(2, "tokens", pa.array(np.zeros(6))))


CODES = {"int32": "i", "int64": "q", "float32": "f", "float64": "d", "bool": "?"}


def spelled_out(kind: str, values: list[Any], present: list[bool] | None = None) -> bytes:
    """The digest format once more, value by value with struct alone; `present` of a nullable column."""

    def framed(text: bytes) -> bytes:
        return struct.pack("<q", len(text)) + text

    parts = [framed(b"ppo_repro digests 1, schema %d" % schema.SCHEMA_VERSION), framed(kind.encode())]
    parts.append(struct.pack("<q?", len(values), present is not None))
    if present is not None:
        parts += [struct.pack("<?", there) for there in present]
        nothing: Any = "" if kind == "string" else 0
        values = [value if there else nothing for value, there in zip(values, present, strict=True)]
    if kind == "string":
        raw = [text.encode() for text in values]
        parts += [struct.pack("<q", len(text)) for text in raw] + raw
    elif kind in digests.ELEMENTS:
        code = CODES[digests.ELEMENTS[kind]]
        parts += [struct.pack("<q", len(items)) for items in values]
        parts += [struct.pack(f"<{len(items)}{code}", *items) for items in values]
    else:
        parts += [struct.pack(f"<{CODES[kind]}", value) for value in values]
    return hashlib.sha256(b"".join(parts)).digest()


def spellable(kind: str, values: Any) -> Any:
    # Python floats are float64, and the way there and back quiets a signalling NaN
    return values[~np.isnan(values)] if kind == "float32" else values


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_digest_is_the_one_spelled_out(kind: str, data: st.DataObject) -> None:
    values = spellable(kind, data.draw(values_of(kind)))
    assert digests.column_digest(kind, array_of(kind, values)) == spelled_out(kind, list(values))


@pytest.mark.parametrize("kind", ["float32", "float64", "string"])
@given(st.data())
def test_digest_with_nulls_is_the_one_spelled_out(kind: str, data: st.DataObject) -> None:
    values = spellable(kind, data.draw(values_of(kind)))
    present = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))), dtype=bool)
    column = nullable_arrow(kind, values, present)
    assert digests.column_digest(kind, column, nullable=True) == spelled_out(kind, list(values), present.tolist())


def test_digests_are_these_until_the_schema_changes() -> None:
    # fingerprints that people have published must not change with a library or a refactoring
    values = {kind: digests.column_digest(kind, array_of(kind, hard_values(kind))).hex()[:12] for kind in KINDS}
    assert values == PINNED
    for kind, pinned in PINNED_WITH_NULLS.items():
        hard = hard_values(kind)
        column = nullable_arrow(kind, hard, np.arange(len(hard)) % 3 != 1)
        assert digests.column_digest(kind, column, nullable=True).hex()[:12] == pinned
    assert digests.chain(digests.FINGERPRINT_SEED, {"b": "1", "a": "2"})[:12] == PINNED_CHAIN
