"""Runs of random values made from the schema alone; also the hard values of every column kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from ppo_repro.config.files import load_any
from ppo_repro.config.inputs import Inputs
from ppo_repro.config.kinds import CONTROL, LANGUAGE, Kind
from ppo_repro.records import arrow, digests, manifest, schema, writer
from ppo_repro.records.manifest import IterationEntry, TableEntry
from ppo_repro.records.run_state import Status
from ppo_repro.records.writer import RunWriter
from tests.support.paths import SMALL_CONTROL, TINY

CONFIGS = {LANGUAGE: TINY, CONTROL: SMALL_CONTROL}
TABLES = {LANGUAGE: schema.TABLES, CONTROL: schema.CONTROL_TABLES}
ENVIRONMENT = {"python": "3", "started": "2026-01-01T00:00:00.000+00:00"}
FINAL: dict[str, float | int | str] = {"eval_accuracy": 0.625, "eval_responses": 8, "policy_digest": "ab12"}

TEXTS = ["", "47+38=", "\0", "\n\t\"'", "e\u0301 \u00e9", "\U0001f600\U00020000", "\u202e\ufeff\uffff", "x" * 300]

# quiet and signalling NaNs with payload and sign, both zeros, denormals, infinities, ordinary numbers
FLOAT32_BITS = [0x7FC00123, 0xFFC00001, 0x7FA00001, 0x80000000, 0, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x3F800001]
FLOAT64_BITS = [
    0x7FF8000000000123,
    0xFFF8000000000001,
    0x7FF4000000000001,
    1 << 63,
    0,
    1,
    0x800FFFFFFFFFFFFF,
    0x7FF0000000000000,
    0xFFF0000000000000,
    0x3FF0000000000001,
]
INT32S = [-(2**31), 2**31 - 1, 0, -1, 7]
INT64S = [-(2**63), 2**63 - 1, 0, -1, 2**53 + 1]


def hard_values(kind: str) -> Any:
    """Every value that a careless writer changes, as `to_arrow` takes it."""
    if kind == "float32":
        return np.array(FLOAT32_BITS, dtype=np.uint32).view(np.float32)
    if kind == "float64":
        return np.array(FLOAT64_BITS, dtype=np.uint64).view(np.float64)
    if kind == "string":
        return TEXTS
    if kind == "list<int32>":
        return [[], INT32S, [0], [], [1, 2, 3]]
    if kind in ("list<float32>", "list<float64>"):
        numbers = hard_values(digests.ELEMENTS[kind])
        return [numbers, numbers[:0], numbers[3:4]]
    return {"int32": np.array(INT32S, np.int32), "int64": np.array(INT64S), "bool": np.array([True, False])}[kind]


def one_column(kind: str, nullable: bool = False) -> schema.Table:
    """A table of one column c."""
    return schema.Table("t", "", (), (schema.Column("c", kind, "nats", "computed", about="Any.", nullable=nullable),))


def values_of(kind: str) -> st.SearchStrategy[Any]:
    """Any values of a kind, as `to_arrow` takes them; floats of any bits."""
    int32 = st.integers(-(2**31), 2**31 - 1)
    if kind == "string":
        return st.lists(st.text(st.characters(codec="utf-8")))
    if kind == "list<int32>":
        return st.lists(st.lists(int32))
    if kind == "list<float32>":
        return st.lists(values_of("float32"))
    if kind == "list<float64>":
        return st.lists(st.one_of(values_of("float64"), st.lists(st.floats())))
    if kind == "bool":
        return st.lists(st.booleans()).map(lambda values: np.array(values, dtype=bool))
    dtype = np.dtype(kind)
    raw = st.integers(0, 2 ** (8 * dtype.itemsize) - 1)
    return st.lists(raw).map(lambda values: np.array(values, dtype=f"u{dtype.itemsize}").view(dtype))


def with_nulls(kind: str, values: Any, present: npt.NDArray[np.bool_]) -> Any:
    """Values of a nullable column, where `present` says so, as `to_arrow` takes them."""
    if kind == "string" or kind in digests.ELEMENTS:
        return [value if there else None for value, there in zip(values, present, strict=True)]
    return pa.array(values, mask=~present)


def random_column(column: schema.Column, rows: int, generator: np.random.Generator) -> Any:
    """`rows` random values, hard ones among them, nulls where they are allowed."""
    hard = hard_values(column.kind)
    picked = generator.integers(0, len(hard), rows)
    values = hard[picked] if isinstance(hard, np.ndarray) else [hard[index] for index in picked]
    if column.kind in ("float32", "float64"):
        ordinary = generator.random(rows) < 0.7
        values[ordinary] = generator.standard_normal(int(ordinary.sum())).astype(values.dtype)
    return with_nulls(column.kind, values, generator.random(rows) >= 0.3) if column.nullable else values


def random_table(table: schema.Table, iteration: int, rows: int, generator: np.random.Generator) -> pa.Table:
    """A table with the iteration, consecutive other keys and random values."""
    columns = {column.name: random_column(column, rows, generator) for column in table.columns}
    for name in table.key:
        columns[name] = np.arange(rows, dtype=np.int32)
    columns["iteration"] = np.full(rows, iteration, dtype=np.int32)
    return arrow.to_arrow(table, columns)


def random_tables(iteration: int, rows: int, seed: int = 0, kind: Kind = LANGUAGE) -> dict[str, pa.Table]:
    """All five tables; the same arguments give the same values."""
    generator = np.random.default_rng([seed, iteration])
    return {table.name: random_table(table, iteration, rows, generator) for table in TABLES[kind]}


def create_run(
    run_dir: Path,
    kind: Kind = LANGUAGE,
    digest: str = "0123456789ab",
    environment: Mapping[str, str] = ENVIRONMENT,
) -> None:
    """A run folder without iterations."""
    inputs = Inputs(load_any(CONFIGS[kind])[1], {}, {"data.jsonl": "00"})
    laid_out = writer.lay_out_run(run_dir, inputs, environment, digest, kind)
    writer.publish_run(laid_out, run_dir)


def start_run(run_dir: Path, kind: Kind = LANGUAGE) -> RunWriter:
    """A run folder without iterations, and who writes into it."""
    create_run(run_dir, kind)
    return RunWriter(run_dir)


def make_run(run_dir: Path, iterations: int = 2, rows: int = 12, seed: int = 0, kind: Kind = LANGUAGE) -> Path:
    """A complete run."""
    written = start_run(run_dir, kind)
    for iteration in range(iterations):
        written.append(iteration, random_tables(iteration, rows, seed, kind))
    written.finish(FINAL, {})
    return run_dir


def log_fields(entries: Sequence[IterationEntry]) -> dict[str, Any]:
    """What the manifest says of a log with these iterations."""
    size, digest = 0, ""
    for line in map(manifest.to_line, entries):
        size, digest = size + len(line), manifest.extended(digest, line)
    return {"num_iterations": len(entries), "log_bytes": size, "log_digest": digest}


def head_at(whole: manifest.Manifest, iterations: int, status: Status) -> manifest.Head:
    """What manifest.json said when so many iterations of the run were committed."""
    kept = whole.iterations[:iterations]
    then = {
        "status": status,
        **log_fields(kept),
        "final": {},
        "ending": {},
        "fingerprint": kept[-1].chain if kept else digests.FINGERPRINT_SEED,
    }
    return whole.model_copy(update=then)


def cut_back(run_dir: Path, iterations: int, status: Status) -> None:
    """Make a complete run what it was after so many iterations."""
    whole = manifest.load(run_dir)
    for entry in whole.iterations[iterations:]:
        for table in (*entry.tables, *entry.beside):
            manifest.table_path(run_dir, table, entry.iteration).unlink()
    for table in whole.ending:
        manifest.table_path(run_dir, table, whole.num_iterations).unlink()
    manifest.save(head_at(whole, iterations, status), run_dir)


def bits(values: Any) -> list[Any]:
    """Values that are equal exactly when their bits are; lists of floats as well."""
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        return list(values.view(f"u{values.dtype.itemsize}").tolist())
    return [_bits(value) for value in list(values)]


def _bits(value: Any) -> Any:
    if isinstance(value, list) and any(isinstance(item, float) for item in value):
        value = np.array(value)
    if isinstance(value, np.ndarray):
        return bits(value) if value.dtype.kind == "f" else value.tolist()
    return value


def list_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """The values of a column; a list of floats as an array, which keeps the bits of a signalling NaN."""
    if not (pa.types.is_list(column.type) and pa.types.is_floating(column.type.value_type)):
        return list(column.to_pylist())
    return [item.values.to_numpy().copy() if item.is_valid else None for item in column]


def rewrite_cell(run_dir: Path, table: str, iteration: int | None, column: str, change: Callable[[Any], Any]) -> None:
    """Make the run one that computed another column: the file is written again, and every digest follows from it."""
    damage_cell(run_dir, table, iteration, column, change)
    accept(run_dir, table, iteration)


def accept(run_dir: Path, table: str, iteration: int | None) -> None:
    """Let log and manifest list a file as it is now: its rows, its values and its bytes."""
    recorded, path = manifest.load(run_dir), manifest.table_path(run_dir, table, iteration)
    definitions = {t.name: t for t in (*manifest.tables_of(recorded), *manifest.side_tables_of(recorded))}
    listed = entry_of(definitions[table], path)
    entries, link = [], digests.FINGERPRINT_SEED
    for entry in recorded.iterations:
        tables, beside = dict(entry.tables), dict(entry.beside)
        if entry.iteration == iteration:
            (tables if table in tables else beside)[table] = listed
        link = manifest.next_link(link, tables)
        entries.append(IterationEntry(entry.iteration, tables, link, beside))
    (run_dir / manifest.LOG_NAME).write_bytes(b"".join(map(manifest.to_line, entries)))
    changes: dict[str, Any] = {"iterations": tuple(entries), **log_fields(entries)}
    if iteration is None:
        changes["preparation"] = {**recorded.preparation, table: listed}
    elif iteration == recorded.num_iterations:
        changes["ending"] = {**recorded.ending, table: listed}
    changed = recorded.model_copy(update=changes)
    fingerprint = manifest.finished_fingerprint(link, changed.final) if changed.status == "complete" else link
    manifest.save(changed.model_copy(update={"fingerprint": fingerprint}), run_dir)


def entry_of(table: schema.Table, path: Path) -> TableEntry:
    """What a manifest says of a file, whose level decides which columns of the table it has."""
    data = pq.ParquetFile(path).read()
    return TableEntry(data.num_rows, digests.table_digest(table, data), manifest.content_digest(path.read_bytes()))


def damage_cell(run_dir: Path, table: str, iteration: int | None, column: str, change: Callable[[Any], Any]) -> None:
    """Change one column of one recorded file and write it back with other Parquet settings."""
    rewrite_file(manifest.table_path(run_dir, table, iteration), column, change)


def rewrite_file(path: Path, column: str, change: Callable[[Any], Any]) -> None:
    """Change one column of a file and write it back with other Parquet settings."""
    data = pq.ParquetFile(path).read()
    index = data.column_names.index(column)
    found = data.column(index).combine_chunks()
    plain = pa.types.is_floating(found.type) or pa.types.is_integer(found.type)
    values = found.to_numpy(zero_copy_only=False).copy() if plain else list_values(found)
    mask = found.is_null().to_numpy(zero_copy_only=False) if plain else None
    changed = pa.array(change(values), found.type, mask=mask, from_pandas=False)
    pq.write_table(data.set_column(index, data.schema.field(index), changed), path, use_dictionary=False)
