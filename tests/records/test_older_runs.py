"""Runs of earlier versions: a column that is gone, and columns that were not there yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from ppo_repro.config.kinds import LANGUAGE
from ppo_repro.errors import UserError
from ppo_repro.records import arrow, digests, manifest, reader, schema, writer
from ppo_repro.records.iteration_log import IterationEntry, TableEntry, next_link
from ppo_repro.runs.diff import first_difference
from tests.support.synthetic_run import FINAL, as_version_2, create_run, make_run, random_table

ROWS = 9


def before_levels(table: schema.Table) -> schema.Table:
    """A table as it was when it had its retired columns and no levels."""
    lean = schema.at_level(table, "lean")
    return replace(lean, columns=(*lean.columns, *table.retired))


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A complete run of one iteration with the tables and the manifest of then."""
    create_run(tmp_path / "older", LANGUAGE)
    generator, entries = np.random.default_rng(3), {}
    for table in map(before_levels, schema.TABLES):
        data = random_table(table, 0, ROWS, generator)
        content = arrow.to_parquet(table, data)
        manifest.table_path(tmp_path / "older", table.name, 0).write_bytes(content)
        listed = TableEntry(ROWS, digests.table_digest(table, data), manifest.content_digest(content))
        entries[table.name] = listed
    entry = IterationEntry(iteration=0, tables=entries, chain=next_link(digests.FINGERPRINT_SEED, entries))
    head = writer.commit(tmp_path / "older", manifest.load_head(tmp_path / "older"), [entry])
    writer.finish(tmp_path / "older", head, FINAL)
    as_version_2(tmp_path / "older")
    return tmp_path / "older"


def test_what_is_new_is_null_and_what_is_gone_is_left_out(older: Path) -> None:
    assert "is_forced" in pq.read_schema(manifest.table_path(older, "tokens", 0)).names
    frame = reader.read_tokens(older)
    assert list(frame.columns) == [column.name for column in schema.TOKENS.columns] and len(frame) == ROWS
    for column in schema.TOKENS.columns:
        if column.level != "lean":
            assert frame[column.name].isna().all()
    assert frame["token_id"].nunique() > 1
    with pytest.raises(UserError, match="no column 'is_forced'"):
        reader.read_tokens(older, columns=["is_forced"])


@pytest.mark.parametrize("verify", ["contents", "pages"])
def test_it_can_be_streamed(older: Path, verify: reader.Verification) -> None:
    (frame,) = reader.stream(older, "tokens", columns=["raw_rewards", "token_id"], verify=verify)
    assert frame["raw_rewards"].isna().all() and frame["token_id"].equals(reader.read_tokens(older)["token_id"])


def test_its_digest_still_covers_the_column_that_is_gone(older: Path) -> None:
    path = manifest.table_path(older, "tokens", 0)
    data = pq.ParquetFile(path).read()
    place = data.column_names.index("is_forced")
    other = [not value for value in data.column(place).to_pylist()]
    changed = data.set_column(place, data.schema.field(place), [other])
    path.write_bytes(arrow.to_parquet(before_levels(schema.TOKENS), changed))
    with pytest.raises(UserError, match="does not match the manifest"):
        reader.read_tokens(older)


@pytest.mark.parametrize("version", [2, 3])
def test_a_retired_column_is_no_column_of_a_run_of_today(tmp_path: Path, version: int) -> None:
    """Also in another place than the last one it is a stranger, whether the digest of the bytes finds it or its own."""
    run_dir = make_run(tmp_path / "today", iterations=1)
    if version == 2:
        as_version_2(run_dir)
    assert first_difference(run_dir, run_dir) is None
    path = manifest.table_path(run_dir, "tokens", 0)
    data = pq.ParquetFile(path).read()
    forced = np.zeros(data.num_rows, bool)
    for place, message in ((data.num_columns, "does not match the manifest"), (0, "has columns is_forced, iteration")):
        changed = data.add_column(place, "is_forced", [forced])
        pq.write_table(changed, path)
        with pytest.raises(UserError, match=message if version == 2 else "has another SHA-256 than when it was"):
            reader.read_tokens(run_dir)
