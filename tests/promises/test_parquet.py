"""A Parquet round trip keeps every bit: NaN payloads, -0.0, denormals, nulls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.records import arrow, digests, reader, schema
from tests.support import synthetic_run
from tests.support.synthetic_run import bits, hard_values, one_column, values_of, with_nulls

KINDS = list(digests.ARROW_TYPES)
# those that pandas has a null for
NULLABLE = ["float32", "float64", "string", "list<int32>", "list<float32>", "list<float64>"]


def written(built: pa.Table) -> pa.Table:
    return pq.ParquetFile(pa.BufferReader(arrow.to_parquet(built))).read()


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_every_bit_comes_back(kind: str, data: st.DataObject) -> None:
    values, table = data.draw(values_of(kind)), one_column(kind)
    built = arrow.to_arrow(table, {"c": values})
    found = written(built)
    assert bits(reader.to_frame(table.columns, [found])["c"].to_numpy()) == bits(values)
    assert digests.table_digest(table, found) == digests.table_digest(table, built)


@pytest.mark.parametrize("kind", NULLABLE)
@given(st.data())
def test_nulls_come_back_and_hide_what_is_under_them(kind: str, data: st.DataObject) -> None:
    values = data.draw(values_of(kind))
    present = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))), dtype=bool)
    table = one_column(kind, nullable=True)
    built = arrow.to_arrow(table, {"c": with_nulls(kind, values, present)})
    found = written(built)
    assert found.column("c").is_valid().to_pylist() == present.tolist()
    column = reader.to_frame(table.columns, [found])["c"]
    shown = [value for value, there in zip(values, present, strict=True) if there]
    assert bits(column.to_numpy()[present]) == bits(shown if isinstance(values, list) else values[present])
    same = [found]
    if isinstance(values, np.ndarray):
        same.append(arrow.to_arrow(table, {"c": pa.array(np.where(present, values, 7), mask=~present)}))
    assert {digests.table_digest(table, each) for each in same} == {digests.table_digest(table, built)}


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_dictionaries_and_conversions_would_lose_bits(kind: str) -> None:
    """The negative control: the usual settings of Parquet, or a way through Python, on the same values."""
    values: Any = hard_values(kind)
    table = one_column(kind)
    built = arrow.to_arrow(table, {"c": values})
    digest = digests.table_digest(table, built)
    rounded = built.set_column(0, "c", pa.array(values.astype(np.float16).astype(values.dtype)))
    assert digests.table_digest(table, rounded) != digest
    merged = np.where(np.isnan(values), np.array(np.nan, values.dtype), values)  # one NaN for all of them
    assert digests.table_digest(table, built.set_column(0, "c", pa.array(merged))) != digest


@pytest.mark.parametrize("rows", [0, 40])
def test_runs_come_back(tmp_path: Path, rows: int) -> None:
    run_dir = synthetic_run.make_run(tmp_path / "seed=1" / "a", rows=rows)
    for table in schema.TABLES:
        frame = reader.read_table(table.name, run_dir)
        assert list(frame.columns) == [column.name for column in table.columns]
        assert len(frame) == 2 * rows
        made = pa.concat_tables([synthetic_run.random_tables(iteration, rows)[table.name] for iteration in range(2)])
        for column in table.columns:
            recorded, found = made.column(column.name), frame[column.name]
            valid = recorded.is_valid().to_numpy()
            assert found[~valid].isna().all()
            if column.kind in ("string", *digests.ELEMENTS):
                assert bits(found[valid]) == bits([v for v in synthetic_run.list_values(recorded) if v is not None])
            else:
                expected = digests.raw_values(column.kind, recorded)[valid]
                assert found.to_numpy()[valid].tobytes() == expected.tobytes()
