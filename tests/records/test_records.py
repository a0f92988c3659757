"""Recorded values come back bit for bit, and nothing is cast, dropped or made up on the way."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.errors import UserError
from ppo_repro.records import arrow, digests, manifest, reader, schema
from tests.support import synthetic_run
from tests.support.synthetic_run import bits, one_column, values_of, with_nulls

KINDS = list(digests.ARROW_TYPES)
FIXED = [kind for kind in KINDS if kind not in ("string", *digests.ELEMENTS)]
# those that pandas has a null for
NULLABLE = ["float32", "float64", "string", "list<int32>", "list<float32>", "list<float64>"]
READERS: dict[str, Callable[..., Any]] = {
    "sequences": reader.read_sequences,
    "tokens": reader.read_tokens,
    "updates": reader.read_updates,
    "steps": reader.read_steps,
    "iterations": reader.read_iterations,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_run.make_run(tmp_path_factory.mktemp("run") / "seed=1" / "a", iterations=3)


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_parquet_keeps_every_bit(kind: str, data: st.DataObject) -> None:
    values = data.draw(values_of(kind))
    table = one_column(kind)
    built = arrow.to_arrow(table, {"c": values})
    found = pq.ParquetFile(pa.BufferReader(arrow.to_parquet(table, built))).read()
    assert bits(reader.to_frame(table.columns, [found])["c"].to_numpy()) == bits(values)
    assert digests.table_digest(table, found) == digests.table_digest(table, built)


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_runs_come_back(tmp_path: Path, rows: int) -> None:
    run_dir = synthetic_run.make_run(tmp_path / "a", rows=rows)
    for table in schema.TABLES:
        frame = READERS[table.name](run_dir)
        assert list(frame.columns) == [column.name for column in table.columns]
        assert list(frame.index) == list(range(2 * rows))
        tables = [synthetic_run.random_tables(iteration, rows)[table.name] for iteration in range(2)]
        for column in table.columns:
            recorded = pa.concat_tables(tables).column(column.name)
            found = frame[column.name]
            if column.kind in FIXED:
                assert found.dtype == np.dtype(column.kind)
                valid = recorded.is_valid().to_numpy()
                expected = digests.raw_values(column.kind, recorded)[valid]
                assert found.to_numpy()[valid].tobytes() == expected.tobytes()
                assert np.isnan(found.to_numpy()[~valid]).all()
            elif column.kind == "string":
                missing = recorded.is_null().to_numpy()
                assert found.isna().to_numpy().tolist() == missing.tolist()
                assert found[~missing].tolist() == [text for text in recorded.to_pylist() if text is not None]
            else:
                assert bits(found) == bits(synthetic_run.list_values(recorded))
                dtype = np.dtype(column.kind.removeprefix("list<").removesuffix(">"))
                assert all(item.dtype == dtype for item in found if item is not None)


def test_only_what_pandas_has_a_null_for_is_nullable() -> None:
    assert {c.kind for table in schema.TABLES for c in table.columns if c.nullable} == set(NULLABLE)
    for kind in ("int32", "int64", "bool"):
        table = one_column(kind, nullable=True)
        built = arrow.to_arrow(table, {"c": [None]})
        with pytest.raises(ValueError, match=f"column c: pandas has no null for {kind}"):
            reader.to_frame(table.columns, [built])


@pytest.mark.parametrize("kind", NULLABLE)
@given(st.data())
def test_nulls_are_kept_and_hide_what_is_under_them(kind: str, data: st.DataObject) -> None:
    values = data.draw(values_of(kind))
    present = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))), dtype=bool)
    table = one_column(kind, nullable=True)
    built = arrow.to_arrow(table, {"c": with_nulls(kind, values, present)})
    found = pq.ParquetFile(pa.BufferReader(arrow.to_parquet(table, built))).read()
    for recorded in (built, found):
        assert recorded.column("c").is_valid().to_pylist() == present.tolist()
        column = reader.to_frame(table.columns, [recorded])["c"]
        assert column[~present].isna().all()
        shown = [value for value, there in zip(values, present, strict=True) if there]
        assert bits(column.to_numpy()[present]) == bits(shown if isinstance(values, list) else values[present])
    listed = [value if there else None for value, there in zip(values, present, strict=True)]
    others = [arrow.to_arrow(table, {"c": listed})]
    if kind in FIXED:
        others.append(arrow.to_arrow(table, {"c": arrow.WithNulls(np.where(present, values, 7), present)}))
    for same in (found, *others):
        assert digests.table_digest(table, same) == digests.table_digest(table, built)


@pytest.mark.parametrize("nullable", [False, True])
def test_lists_in_two_arrays_are_the_same_lists(nullable: bool) -> None:
    table, elements = one_column("list<int32>", nullable), np.arange(5, dtype=np.int32)
    built = arrow.to_arrow(table, {"c": arrow.Lists(elements, np.array([2, 0, 3]))})
    elements[:] = 9
    assert built.column("c").to_pylist() == [[0, 1], [], [2, 3, 4]]
    assert built.equals(arrow.to_arrow(table, {"c": [[0, 1], [], [2, 3, 4]]}))


@pytest.mark.parametrize("kind", NULLABLE)
def test_a_column_of_nulls_is_nulls(kind: str) -> None:
    table = one_column(kind, nullable=True)
    built = arrow.to_arrow(table, {"c": arrow.AllNull(2)})
    assert built.equals(arrow.to_arrow(table, {"c": [None, None]}))


def test_units_and_descriptions_are_in_the_file(run: Path) -> None:
    found = pq.read_schema(manifest.table_path(run, "tokens", 0))
    assert found.field("ref_kl").metadata[b"unit"] == b"nats"
    assert b"whole distribution" in found.field("ref_kl").metadata[b"description"]
    assert found.metadata[b"grain"] == b"one row per response token"


BAD_COLUMNS: list[tuple[str, Any, str]] = [
    ("float32", np.zeros(2), "float64"),
    ("float32", np.zeros(2, dtype=">f4"), ">f4"),
    ("float32", [0.5, 0.5], "holds float where float32"),
    ("float32", np.zeros((2, 1), dtype=np.float32), r"shape \(2, 1\)"),
    ("float64", np.ma.masked_array(np.zeros(2), mask=[0, 1]), "MaskedArray"),
    ("float64", [0.5, None], "NoneType"),
    ("float64", [0.5, 1], "holds int"),
    ("int32", np.zeros(2, dtype=np.int64), "int64"),
    ("int32", [0, 2**31], "c: "),
    ("int32", [0, True], "holds bool"),
    ("bool", [0, 1], "holds int"),
    ("bool", np.zeros(2, dtype=np.uint8), "uint8"),
    ("string", ["a", b"b"], "holds bytes"),
    ("string", ["a", None], "NoneType"),
    ("string", "ab", "is a str"),
    ("string", ["a", "\ud800"], "surrogates not allowed"),
    ("list<int32>", [[1], [2.5]], "holds float"),
    ("list<int32>", [[1], np.zeros(1, dtype=np.int64)], "holds int64"),
    ("list<int32>", [[1], [None]], "NoneType"),
    ("list<int32>", [[1], [2**31]], "c: "),
    ("list<float64>", [[0.5], [1]], "holds int"),
    ("list<float32>", [[0.5]], "holds float where"),
    ("list<float32>", [np.zeros(1)], "holds float64"),
    ("list<float32>", [np.zeros((1, 1), np.float32)], r"of shape \(1, 1\)"),
    ("list<float64>", [[0.5], np.zeros(1, dtype=np.float32)], "holds float32"),
    ("list<float64>", [[0.5], np.zeros((1, 1))], r"shape \(1, 1\)"),
    ("list<float64>", [[0.5], [None]], "NoneType"),
    ("list<float64>", [[0.5], None], "NoneType"),
    ("list<float64>", np.zeros((2, 1)), "is a ndarray"),
    ("list<int32>", arrow.Lists(np.zeros(3, np.int64), np.array([1, 2])), "int64 of shape"),
    ("list<int32>", arrow.Lists(np.zeros(2, np.int32), np.array([1, 2])), r"shape \(2,\) in lists of 3"),
    ("list<int32>", arrow.AllNull(2), "is not nullable"),
    ("float32", arrow.AllNull(2), "is not nullable"),
    ("float32", arrow.WithNulls(np.zeros(2, dtype=np.float32), np.ones(2, dtype=bool)), "is not nullable"),
]
THERE = np.array([True, False])
BAD_NULLABLE_COLUMNS: list[tuple[str, Any, str]] = [
    ("float32", arrow.WithNulls(np.zeros(2), THERE), "float64"),
    ("float32", arrow.WithNulls(np.zeros(3, dtype=np.float32), THERE), r"has \(3,\) .* says of \(2,\)"),
    ("float32", arrow.WithNulls(np.zeros(2, dtype=np.float32), THERE.astype(np.uint8)), "says of"),
    ("float32", arrow.WithNulls(np.zeros((2, 2), dtype=np.float32), np.ones((2, 2), dtype=bool)), r"shape \(2, 2\)"),
    ("float64", arrow.WithNulls(np.ma.masked_array(np.zeros(2), mask=[0, 1]), THERE), "MaskedArray"),
    ("float32", [None, 0.5], "holds float where float32"),
    ("string", [None, 3], "holds int"),
    ("string", [None, float("nan")], "holds float"),
    ("list<int32>", [None, [2.5]], "holds float"),
    ("list<float64>", [None, [1]], "holds int"),
]


@pytest.mark.parametrize(("kind", "values", "message"), BAD_COLUMNS)
def test_nothing_is_cast_in_silence(kind: str, values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^table t, column c: .*{message}|^table t, column {message}"):
        arrow.to_arrow(one_column(kind), {"c": values})


@pytest.mark.parametrize(("kind", "values", "message"), BAD_NULLABLE_COLUMNS)
def test_nulls_let_nothing_else_in(kind: str, values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^table t, column c: .*{message}"):
        arrow.to_arrow(one_column(kind, nullable=True), {"c": values})


def test_exactly_the_columns_of_the_schema() -> None:
    columns = {name: [1, 2] for name in ("iteration", "sequence")}
    table = dataclasses.replace(schema.SEQUENCES, columns=schema.SEQUENCES.columns[:2])
    with pytest.raises(ValueError, match="table sequences, column sequence: missing"):
        arrow.to_arrow(table, {"iteration": [1]})
    with pytest.raises(ValueError, match="table sequences, column more: not in the schema"):
        arrow.to_arrow(table, {**columns, "more": [1, 2]})
    with pytest.raises(ValueError, match="column sequence: has 1 rows, iteration has 2"):
        arrow.to_arrow(table, {**columns, "sequence": [1]})


def test_the_record_does_not_share_memory() -> None:
    values = np.arange(6, dtype=np.float32)[::2]
    built = arrow.to_arrow(one_column("float32"), {"c": values})
    present = np.array([True, False, True])
    nullable = arrow.to_arrow(one_column("float32", nullable=True), {"c": arrow.WithNulls(values, present)})
    listed = arrow.to_arrow(one_column("list<float64>"), {"c": [row := np.ones(2)]})
    values[:], present[:], row[:] = 9, True, 9
    assert built.column("c").to_pylist() == [0.0, 2.0, 4.0]
    assert nullable.column("c").to_pylist() == [0.0, None, 4.0]
    assert listed.column("c").to_pylist() == [[1.0, 1.0]]


def test_columns_and_iterations_are_chosen(run: Path) -> None:
    frame = reader.read_tokens(run, iterations=[2, 0], columns=["rewards", "iteration"])
    assert list(frame.columns) == ["rewards", "iteration"]
    assert frame["iteration"].tolist() == [2] * 12 + [0] * 12
    assert reader.read_steps(run, iterations=[]).dtypes["policy_loss"] == np.float64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"columns": ["reward"]}, "tokens has no column 'reward'; there are iteration, "),
        ({"columns": ["rewards", "rewards"]}, "'rewards' is asked for twice"),
        ({"columns": "rewards"}, "must be a list of names"),
        ({"iterations": [3]}, "no iteration 3; recorded are 0 to 2"),
        ({"iterations": [-1]}, "no iteration -1"),
        ({"iterations": [1.0]}, "no iteration 1.0"),
        ({"iterations": [1, 1]}, "iteration 1 is asked for twice"),
    ],
)
def test_what_is_not_there_is_refused(run: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        reader.read_tokens(run, **arguments)
    assert "\n" not in str(caught.value)


def test_unknown_table(run: Path) -> None:
    with pytest.raises(UserError, match="no table 'token'; there are sequences, tokens"):
        reader.read_arrow(run, "token", 0)


def test_environment_and_configuration_are_written(run: Path) -> None:
    assert (run / "config.yaml").read_text() == "seed: 1\n"
    assert json.loads((run / "environment.json").read_text()) == {"python": "3"}
    assert [path for path in run.rglob("*.tmp")] == []
    assert os.path.basename(run.parent) == "seed=1"
