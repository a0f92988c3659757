"""The first differing cell of two runs is named exactly, for every kind of column."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from ppo_repro.records import arrow, digests, manifest, reader, schema
from ppo_repro.records.diff import first_difference, first_table_difference
from tests.support import synthetic_run

CELLS = [(table, column) for table in schema.TABLES for column in table.columns]
FIRST_OF_KIND = {(t.name, c.kind): c.name for t, c in reversed(CELLS)}
CELLS = [(t, c) for t, c in CELLS if FIRST_OF_KIND[t.name, c.kind] == c.name or not c.is_result]
ROW = 5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_run.make_run(tmp_path_factory.mktemp("run") / "a")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "b"))


def _flip_at(row: int) -> Callable[[Any], Any]:
    """Change one bit of the value in a row."""

    def flip(values: Any) -> Any:
        if isinstance(values, np.ndarray):
            values.view(f"u{values.dtype.itemsize}")[row] ^= 1
        elif isinstance(values[row], bool):
            values[row] = not values[row]
        elif isinstance(values[row], str):
            values[row] = values[row][:-1] + chr(ord(values[row][-1]) ^ 1) if values[row] else "\x01"
        elif isinstance(values[row], np.ndarray):
            values[row] = flip_last(values[row])
        else:
            values[row] = [*values[row][:-1], values[row][-1] ^ 1] if values[row] else [1]
        return values

    def flip_last(items: npt.NDArray[Any]) -> npt.NDArray[Any]:
        changed = items.copy() if len(items) else np.ones(1, items.dtype)
        changed.view(f"u{items.dtype.itemsize}")[-1] ^= 1
        return changed

    return flip


_flip = _flip_at(ROW)


def _cell(run_dir: Path, table: str, iteration: int, column: str, row: int) -> Any:
    tables = reader.read_moment(run_dir, manifest.load(run_dir), iteration, verify=False)
    return tables[table].column(column)[row].as_py()


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float) and isinstance(right, float):
        return np.float64(left).tobytes() == np.float64(right).tobytes()
    return type(left) is type(right) and bool(left == right)


def _row_with_a_value(run_dir: Path, table: schema.Table, column: schema.Column) -> int:
    """ROW, or the first one after it that is not null."""
    tables = reader.read_moment(run_dir, manifest.load(run_dir), 1)
    valid = tables[table.name].column(column.name).is_valid().to_pylist()
    return next(row for row in range(ROW, len(valid)) if valid[row])


@pytest.mark.parametrize(("table", "column"), CELLS, ids=[f"{t.name}.{c.name}" for t, c in CELLS])
def test_one_flipped_bit_is_named(run: Path, copy: Path, table: schema.Table, column: schema.Column) -> None:
    row = _row_with_a_value(run, table, column)
    assert row == ROW or column.nullable
    synthetic_run.damage_cell(copy, table.name, 1, column.name, _flip_at(row))
    synthetic_run.accept(copy, table.name, 1)
    found = first_difference(run, copy)
    if not column.is_result:
        assert found is None
        return
    assert found is not None
    assert (found.table, found.iteration, found.column, found.row) == (table.name, 1, column.name, row)
    assert _same(found.left, _cell(run, table.name, 1, column.name, row))
    assert _same(found.right, _cell(copy, table.name, 1, column.name, row))
    assert not _same(found.left, found.right)
    assert found.key == {name: 1 if name == "iteration" else row for name in table.key}
    assert (found.unequal_in_column, found.rows) == (1, 12)
    if column.kind in ("bool", "string", *digests.ELEMENTS):
        assert found.left_bits == found.right_bits == ""
    else:
        assert len(found.left_bits) == (8 if column.kind.endswith("32") else 16)
        assert int(found.left_bits, 16) ^ int(found.right_bits, 16) == 1
    assert "\n" not in found.describe()
    assert column.name in found.describe()


def test_the_earliest_difference_wins(run: Path, copy: Path) -> None:
    for table, iteration, column in (("sequences", 1, "seed"), ("steps", 0, "policy_digest"), ("tokens", 0, "rewards")):
        synthetic_run.rewrite_cell(copy, table, iteration, column, _flip)
        found = first_difference(run, copy)
        assert found is not None
        assert (found.table, found.iteration, found.column) == (table, iteration, column)


def _iterations_table(values: list[float | None]) -> pa.Table:
    generator = np.random.default_rng(0)
    rows = len(values)
    columns = {c.name: synthetic_run.random_column(c, rows, generator) for c in schema.ITERATIONS.columns}
    return arrow.to_arrow(schema.ITERATIONS, {**columns, "eval_score": values})


@pytest.mark.parametrize(
    ("left", "right", "row"),
    [
        ([0.0], [-0.0], 0),
        ([None], [0.0], 0),
        ([1.0, 0.0], [1.0, None], 1),
        ([None, float("nan")], [None, float("nan")], None),
        ([float("nan")], [np.uint64(0x7FF8000000000001).view(np.float64)], 0),
        ([None], [None], None),
        ([], [], None),
        ([0.5, 0.5], [0.5], 1),
    ],
)
def test_bits_and_nulls_decide(left: list[Any], right: list[Any], row: int | None) -> None:
    found = first_table_difference(schema.ITERATIONS, _iterations_table(left), _iterations_table(right), 3)
    assert (found.row if found else None) == row
    if found is not None:
        assert (found.column, found.iteration) == ("(rows)" if len(left) != len(right) else "eval_score", 3)
        assert found.column == "(rows)" or "bits" in found.describe()
