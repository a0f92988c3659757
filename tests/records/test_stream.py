"""Streaming gives the rows that reading gives, refuses what reading refuses, and holds one batch in memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.errors import UserError
from ppo_repro.records import manifest, reader, schema, writer
from tests.support import synthetic_run
from tests.support.paths import ROOT
from tests.support.synthetic_run import bits

MODES: tuple[reader.Verification, ...] = ("contents", "pages")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_run.make_run(tmp_path_factory.mktemp("run") / "seed=1" / "a", iterations=3)


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run, tmp_path / "copy")


def drain(run_dir: Path, table: str = "tokens", **options: Any) -> pd.DataFrame:
    columns = options.pop("columns", ["iteration", "old_logprobs", "values"])
    return pd.concat(list(reader.stream(run_dir, table, columns=columns, **options)), ignore_index=True)


@pytest.mark.parametrize("verify", MODES)
@pytest.mark.parametrize("rows", [1, 5, 12, 1000])
def test_the_rows_are_those_of_the_whole_table(run: Path, verify: reader.Verification, rows: int) -> None:
    for table in schema.TABLES:
        check_rows(run, table, verify, rows)


def check_rows(run: Path, table: schema.Table, verify: reader.Verification, rows: int) -> None:
    # not in the order of the file, and without its first column
    names = [column.name for column in table.columns][:0:-1]
    frames = list(reader.stream(run, table.name, columns=names, rows=rows, iterations=[2, 0], verify=verify))
    whole = reader.to_frame(
        [column for name in names for column in table.columns if column.name == name],
        [reader.read_arrow(run, table.name, iteration).select(names) for iteration in (2, 0)],
    )
    assert {len(frame) for frame in frames} <= {rows, 12 % rows, min(rows, 12)}
    for name in names:
        found = [value for frame in frames for value in bits(frame[name].to_numpy())]
        assert repr(found) == repr(bits(whole[name].to_numpy()))
        assert all(list(frame.columns) == names for frame in frames)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ["reward"]}, "tokens has no column 'reward'"),
        ({"columns": "rewards"}, "must be a list of names"),
        ({"iterations": [3]}, "no iteration 3; recorded are 0 to 2"),
        ({"table": "token"}, "no table 'token'; there are sequences, tokens"),
        ({"rows": 0}, "rows = 0, .*: rows is at least 1"),
        ({"verify": "none"}, "verify = 'none': .* verify contents or pages"),
    ],
)
def test_what_is_not_there_is_refused_before_the_first_row(run: Path, options: dict[str, Any], message: str) -> None:
    for verify in MODES:
        arguments: dict[str, Any] = {"columns": ["rewards"], "table": "tokens", "verify": verify, **options}
        with pytest.raises(UserError, match=message):
            reader.stream(run, arguments.pop("table"), **arguments)


def test_incomplete_runs_are_refused_unless_allowed(tmp_path: Path) -> None:
    current = synthetic_run.start_run(tmp_path / "a")
    writer.append_iteration(tmp_path / "a", current, 0, synthetic_run.random_tables(0, 4))
    with pytest.raises(UserError, match="the run is running after 1 recorded iterations"):
        drain(tmp_path / "a")
    assert len(drain(tmp_path / "a", allow_incomplete=True)) == 4


def _remove(path: Path) -> None:
    path.unlink()


def _halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _other_table(path: Path) -> None:
    shutil.copy(path.parents[1] / "steps" / path.name, path)


def _other_type(path: Path) -> None:
    data = pq.ParquetFile(path).read()
    index = data.column_names.index("rewards")
    pq.write_table(data.set_column(index, "rewards", data.column("rewards").cast("double")), path)


def _fewer_rows(path: Path) -> None:
    pq.write_table(pq.ParquetFile(path).read().slice(1), path)


@pytest.mark.parametrize("verify", MODES)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove, r"tokens/iteration=000001\.parquet: is missing"),
        (_halve, r"tokens/iteration=000001\.parquet: cannot be read"),
        (_other_table, "has columns iteration, epoch, "),
        # a column that is not asked for
        (_other_type, "column rewards holds double, expected float32"),
        (_fewer_rows, "does not match the manifest"),
    ],
)
@pytest.mark.parametrize("version", [2, 3])
def test_damage_is_refused(
    copy: Path, verify: reader.Verification, damage: Callable[[Path], None], message: str, version: int
) -> None:
    if version == 2:
        synthetic_run.as_version_2(copy)
    elif damage is not _remove:
        message = r"tokens/iteration=000001\.parquet: has another SHA-256 than when it was written"
    damage(manifest.table_path(copy, "tokens", 1))
    with pytest.raises(UserError, match=message) as caught:
        drain(copy, verify=verify)
    assert "\n" not in str(caught.value)
    assert len(drain(copy, iterations=[0, 2], verify=verify)) == 24


@given(st.data())
def test_any_flipped_bit_is_refused(run: Path, data: st.DataObject) -> None:
    path = manifest.table_path(run, "tokens", 1)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        path.write_bytes(damaged)
        for verify in MODES:
            with pytest.raises(UserError, match="has another SHA-256 than when it was written"):
                drain(run, verify=verify, rows=5)
    finally:
        path.write_bytes(whole)


@pytest.fixture(scope="module")
def earlier(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run as manifest version 2 had it."""
    copy = Path(shutil.copytree(run, tmp_path_factory.mktemp("earlier") / "run"))
    synthetic_run.as_version_2(copy)
    return copy


@given(st.data())
def test_a_flipped_bit_in_an_earlier_run_is_refused_or_changes_nothing(earlier: Path, data: st.DataObject) -> None:
    run = earlier
    path = manifest.table_path(run, "tokens", 1)
    whole = path.read_bytes()
    expected = drain(run)
    pages_end = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    position, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(whole)
    damaged[position] ^= 1 << bit
    verify = data.draw(st.sampled_from(MODES))
    try:
        path.write_bytes(damaged)
        found = drain(run, verify=verify, rows=5)
    except UserError as error:
        assert "damaged" in str(error) and "\n" not in str(error)
    else:
        assert len(found) == len(expected)
        # no checksum covers the footer, which says where the pages of a column are
        if verify == "contents" or position < pages_end:
            assert all(bits(found[name].to_numpy()) == bits(expected[name].to_numpy()) for name in expected)
    finally:
        path.write_bytes(whole)


def test_another_valid_file_is_noticed_but_by_pages_of_an_earlier_run(run: Path, copy: Path) -> None:
    shutil.copy(manifest.table_path(copy, "tokens", 0), manifest.table_path(copy, "tokens", 1))
    for verify in MODES:
        with pytest.raises(UserError, match="has another SHA-256 than when it was written"):
            drain(copy, verify=verify)
    shutil.copy(manifest.table_path(run, "tokens", 1), manifest.table_path(copy, "tokens", 1))
    synthetic_run.as_version_2(copy)
    shutil.copy(manifest.table_path(copy, "tokens", 0), manifest.table_path(copy, "tokens", 1))
    with pytest.raises(UserError, match="does not match the manifest"):
        drain(copy)
    assert len(drain(copy, verify="pages")) == 36


MEMORY = """
import sys
import pyarrow as pa
from ppo_repro.records import reader
before = pa.default_memory_pool().max_memory()
rows = sum(len(frame) for frame in reader.stream(sys.argv[1], "tokens", columns=["old_logprobs"], rows=1 << 14,
                                                 verify=sys.argv[2]))
print(rows, pa.default_memory_pool().max_memory() - before)
"""


@pytest.mark.slow
def test_pages_hold_one_batch_however_large_the_file(tmp_path: Path) -> None:
    current = synthetic_run.start_run(tmp_path / "a")
    tables = synthetic_run.random_tables(0, 200_000)
    tables = {name: table if name == "tokens" else table.slice(0, 1) for name, table in tables.items()}
    current = writer.append_iteration(tmp_path / "a", current, 0, tables)
    writer.finish(tmp_path / "a", current, {})

    def peak(verify: str) -> int:
        command = [sys.executable, "-c", MEMORY, str(tmp_path / "a"), verify]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        rows, allocated = done.stdout.split()
        assert rows == "200000"
        return int(allocated)

    # 17 MB of values against batches of 64 kB of one column, a page of 1 MB, and its compressed bytes
    assert peak("contents") > 15_000_000
    assert peak("pages") < 6_000_000
