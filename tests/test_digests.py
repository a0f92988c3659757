"""Digests see every bit, row order and names, and nothing of how the values are stored."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_repro.records import digests, schema, writer
from tests import synthetic_run
from tests.synthetic_run import bits, hard_values, one_column, values_of

KINDS = list(digests.ARROW_TYPES)

PINNED = {
    "int32": "d3e476c73ddc",
    "int64": "a4cd2f151e7c",
    "float32": "dcf07c35d9bb",
    "float64": "ef51c0dacd3f",
    "bool": "51e4b44bc43a",
    "string": "f16acacb191e",
    "list<int32>": "8ec30d5d8707",
    "list<float32>": "d722b47c668e",
}
PINNED_CHAIN = "cb9e52f26630"


def arrow(kind: str, values: Any) -> pa.ChunkedArray:
    return writer.to_arrow(one_column(kind), {"c": values}).column("c")


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_digest_ignores_the_encoding(kind: str, data: st.DataObject) -> None:
    column = arrow(kind, data.draw(values_of(kind)))
    digest = digests.column_digest(kind, column)
    cut = data.draw(st.integers(0, len(column)))
    chunks = [*column.slice(0, cut).chunks, *column.slice(cut).chunks]
    assert digests.column_digest(kind, pa.chunked_array(chunks, column.type)) == digest
    padded = pa.concat_arrays([*column.slice(0, 1).chunks, *column.chunks, pa.array([], column.type)])
    assert digests.column_digest(kind, padded.slice(min(1, len(column)))) == digest
    # a dictionary of floats would merge NaNs before any digest is taken
    if kind in ("string", "int32", "int64"):
        assert digests.column_digest(kind, column.dictionary_encode()) == digest
    wider = {"string": pa.large_string(), "list<int32>": pa.large_list(pa.int32())}.get(kind)
    wider = pa.large_list(pa.float32()) if kind == "list<float32>" else wider
    if wider is not None:
        assert digests.column_digest(kind, column.cast(wider)) == digest
    size, codec = data.draw(st.integers(1, 5)), data.draw(st.sampled_from(["none", "snappy", "zstd"]))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"c": column}), sink, use_dictionary=False, row_group_size=size, compression=codec)
    stored = pq.ParquetFile(pa.BufferReader(sink.getvalue())).read().column("c")
    assert digests.column_digest(kind, stored) == digest


@pytest.mark.parametrize("kind", ["int32", "int64", "float32", "float64"])
def test_digest_sees_every_bit(kind: str) -> None:
    values = hard_values(kind)
    width = values.dtype.itemsize
    seen = {digests.column_digest(kind, arrow(kind, values))}
    for row in range(len(values)):
        for bit in range(8 * width):
            changed = values.copy()
            changed.view(f"u{width}")[row] ^= np.array(1 << bit, dtype=f"u{width}")
            seen.add(digests.column_digest(kind, arrow(kind, changed)))
    assert len(seen) == 1 + len(values) * 8 * width


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_digests_are_equal_exactly_when_the_values_are(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    left, right = data.draw(values_of(kind)), data.draw(values_of(kind))
    same = digests.column_digest(kind, arrow(kind, left)) == digests.column_digest(kind, arrow(kind, right))
    assert same == (bits(left) == bits(right))


def test_digest_frames_texts_and_lists() -> None:
    seen = {
        digests.column_digest("string", arrow("string", v)) for v in (["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""])
    }
    lists: list[list[list[int]]] = [[[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]], [[1, 2, 3], []]]
    seen |= {digests.column_digest("list<int32>", arrow("list<int32>", v)) for v in lists}
    seen |= {digests.column_digest(kind, arrow(kind, [])) for kind in ("string", "list<int32>")}
    assert len(seen) == 10


def test_digest_tells_null_from_zero_and_nan() -> None:
    table = one_column("float64", nullable=True)
    seen = set()
    for value in (None, 0.0, float("nan")):
        built = writer.to_arrow(table, {"c": [1.0, value]})
        seen.add(digests.column_digest("float64", built.column("c"), nullable=True))
    assert len(seen) == 3
    hidden = pa.array(np.array([1.0, 5.0]), mask=np.array([False, True]))
    assert digests.column_digest("float64", hidden, nullable=True) in seen
    with pytest.raises(ValueError, match="1 null values"):
        digests.column_digest("float64", hidden)


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


def spelled_out(kind: str, values: list[Any]) -> bytes:
    """The digest format once more, value by value with struct alone."""

    def framed(text: bytes) -> bytes:
        return struct.pack("<q", len(text)) + text

    parts = [framed(b"ppo_repro digests 1, schema %d" % schema.SCHEMA_VERSION), framed(kind.encode())]
    parts.append(struct.pack("<q?", len(values), False))
    if kind in ("string", *digests.ELEMENTS):
        code = "i" if kind == "list<int32>" else "f"
        raw = [v.encode() if kind == "string" else struct.pack(f"<{len(v)}{code}", *v) for v in values]
        width = 1 if kind == "string" else 4
        parts += [struct.pack("<q", len(item) // width) for item in raw] + raw
    else:
        code = {"int32": "i", "int64": "q", "float32": "f", "float64": "d", "bool": "?"}[kind]
        parts += [struct.pack(f"<{code}", value) for value in values]
    return hashlib.sha256(b"".join(parts)).digest()


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_digest_is_the_one_spelled_out(kind: str, data: st.DataObject) -> None:
    values = data.draw(values_of(kind))
    if kind == "float32":
        # Python floats are float64, and the way there and back quiets a signalling NaN
        values = values[~np.isnan(values)]
    elif kind == "list<float32>":
        values = [v[~np.isnan(v)] for v in values]
    assert digests.column_digest(kind, arrow(kind, values)) == spelled_out(kind, list(values))


def test_digests_are_these_until_the_schema_changes() -> None:
    # fingerprints that people have published must not change with a library or a refactoring
    values = {kind: digests.column_digest(kind, arrow(kind, hard_values(kind))).hex()[:12] for kind in KINDS}
    assert values == PINNED
    assert digests.chain(digests.FINGERPRINT_SEED, {"b": "1", "a": "2"})[:12] == PINNED_CHAIN
