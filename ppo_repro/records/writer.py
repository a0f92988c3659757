"""Writing a run: first the tables, then the manifest that lists them, so that a killed run stays readable.

`runs.lifetime.appending` does it on a thread beside the next iteration.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ppo_repro import files as disk
from ppo_repro.config.kinds import Kind
from ppo_repro.errors import UserError
from ppo_repro.files import require_new
from ppo_repro.records import arrow, digests, iteration_log, manifest, schema
from ppo_repro.records.config_file import CONFIG_NAME
from ppo_repro.records.iteration_log import IterationEntry, TableEntry, next_link
from ppo_repro.records.manifest import Head, Status


def lay_out_run(
    run_dir: Path,
    config_yaml: str,
    environment: Mapping[str, Any],
    config_digest: str,
    inputs: Mapping[str, str],
    kind: Kind,
) -> Path:
    """Make a run folder with an empty manifest under a temporary name, which is returned. UserError where it cannot.

    `publish_run` gives it its name, so that it appears whole or not at all.
    """
    note = manifest.note_content(environment)
    start = Head(
        schema_version=schema.SCHEMA_VERSION,
        kind=kind,
        status="running",
        config_digest=config_digest,
        inputs=dict(sorted(inputs.items())),
        notes={"environment.json": manifest.content_digest(note)},
        files={CONFIG_NAME: manifest.content_digest(config_yaml.encode())},
        num_iterations=0,
        log_bytes=0,
        final={},
        fingerprint=digests.FINGERPRINT_SEED,
    )
    temporary = _make_folder(run_dir)
    try:
        for table in manifest.tables_of(start):
            (temporary / "records" / table.name).mkdir(parents=True)
        disk.sync(temporary / "records")
        disk.atomic_write(temporary / CONFIG_NAME, config_yaml.encode())
        disk.atomic_write(temporary / "environment.json", note)
        disk.atomic_write(temporary / iteration_log.FILE_NAME, b"")
        manifest.save(start, temporary)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise _cannot_write(run_dir, error) from error
    return temporary


def publish_run(temporary: Path, run_dir: Path) -> None:
    """Rename what `lay_out_run` made to the run folder; UserError where that fails."""
    try:
        os.rename(temporary, run_dir)
        disk.sync(run_dir.parent)
    except OSError as error:
        raise _cannot_write(run_dir, error) from error


def _cannot_write(run_dir: Path, error: OSError) -> UserError:
    return UserError(f"{run_dir}: cannot be written ({error.strerror}); choose another --out")


def record_preparation(run_dir: Path, current: Head, tables: Mapping[str, pa.Table]) -> Head:
    """Write the side tables of what came before the first iteration, then the manifest that lists them.

    Raises as `append_iteration`.
    """
    _require_open(run_dir, current)
    return _save(run_dir, current, {"preparation": _write_side_tables(run_dir, current, None, tables)})


def append_iteration(run_dir: Path, current: Head, iteration: int, tables: Mapping[str, pa.Table]) -> Head:
    """`append_iterations` of one."""
    return append_iterations(run_dir, current, iteration, [tables])


def append_iterations(run_dir: Path, current: Head, first: int, batch: Sequence[Mapping[str, pa.Table]]) -> Head:
    """Write all tables of the next iterations, then their lines of the log, then the manifest that accepts them.

    Of several iterations each table is one file. Side tables may be among an iteration's or not.
    Raises ValueError on tables or an iteration that do not belong here, UserError where writing fails.
    """
    _require_open(run_dir, current)
    if current.status != "running":
        raise ValueError(f"the run is {current.status}; mark it running before appending")
    if first != current.num_iterations:
        raise ValueError(f"iteration {first} cannot follow {current.num_iterations} recorded iterations")
    expected = manifest.tables_of(current)
    side_names = {table.name for table in manifest.side_tables_of(current)}
    for tables in batch:
        if tables.keys() - side_names != {table.name for table in expected}:
            raise ValueError(f"has tables {sorted(tables)}, expected {sorted(t.name for t in expected)}")
    # all of them before the first is written
    built = [[_as_built(t, tables[t.name], index) for index, tables in enumerate(batch, first)] for t in expected]
    written: list[dict[str, TableEntry]] = [{} for _ in batch]
    for each in built:
        name = each[0].name
        parts = [tables[name] for tables in batch]
        for entries, entry in zip(written, _write_parts(run_dir, each, first, parts), strict=True):
            entries[name] = entry
    link, found = current.fingerprint, []  # while a run is not complete its fingerprint is the last link
    for iteration, (tables, entries) in enumerate(zip(batch, written, strict=True), first):
        link = next_link(link, entries)
        beside = {name: data for name, data in tables.items() if name in side_names}
        side_entries = _write_side_tables(run_dir, current, iteration, beside)
        shared = None if len(batch) == 1 else first
        found.append(IterationEntry(iteration, entries, link, side_entries, shared))
    return commit(run_dir, current, found)


def _write_parts(
    run_dir: Path, built: Sequence[schema.Table], first: int, parts: Sequence[pa.Table]
) -> list[TableEntry]:
    """Write one table of neighbouring iterations as one file; an entry for each."""
    content = arrow.to_parquet(built[0], *parts)
    disk.atomic_write(manifest.table_path(run_dir, built[0].name, first), content)
    of_bytes = manifest.content_digest(content)
    return [
        TableEntry(data.num_rows, digests.table_digest(each, data), of_bytes)
        for each, data in zip(built, parts, strict=True)
    ]


def _write_side_tables(
    run_dir: Path, current: Head, iteration: int | None, tables: Mapping[str, pa.Table]
) -> dict[str, TableEntry]:
    """Write files of side tables; returns their entries. ValueError on a table that this kind of run has not."""
    by_name = {table.name: table for table in manifest.side_tables_of(current)}
    entries = {}
    for name, data in tables.items():
        if name not in by_name:
            raise ValueError(f"has table {name}, expected only {', '.join(by_name)}")
        table = _as_built(by_name[name], data, iteration)
        path = manifest.side_path(run_dir, name, iteration)
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"{path.parent}: cannot be made ({error.strerror}); make room there") from error
        entries[name] = _write_table(path, table, data)
    return entries


def _write_table(path: Path, table: schema.Table, data: pa.Table) -> TableEntry:
    content = arrow.to_parquet(table, data)
    disk.atomic_write(path, content)
    return TableEntry(data.num_rows, digests.table_digest(table, data), manifest.content_digest(content))


def commit(run_dir: Path, current: Head, entries: Sequence[IterationEntry]) -> Head:
    """Append the next iterations, whose tables are on disk, to the log; then let the manifest count them.

    Both are on disk when this returns. UserError where writing fails.
    """
    size, digest = iteration_log.append(run_dir, current.log_bytes, current.log_digest, entries)
    counted = {"num_iterations": entries[-1].iteration + 1, "log_bytes": size, "log_digest": digest}
    return _save(run_dir, current, {**counted, "fingerprint": entries[-1].chain})


def finish(
    run_dir: Path,
    current: Head,
    final: Mapping[str, float | int | str],
    notes: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    tables: Mapping[str, pa.Table] | None = None,
) -> Head:
    """Close the run with its final results, digests of new notes, and digests of files in place of those before.

    `tables`: the side tables after the last iteration.

    ValueError on results of other types, UserError where writing fails.
    """
    _require_open(run_dir, current)
    if current.status != "running":
        raise ValueError(f"the run is {current.status}; only a running run can be finished")
    for name, value in final.items():
        # pydantic would turn numpy integers into floats
        if type(value) not in (float, int, str):
            raise ValueError(f"final result {name} is a {type(value).__name__}, expected float, int or str")
    fingerprint = manifest.finished_fingerprint(current.fingerprint, final)
    ending = _write_side_tables(run_dir, current, current.num_iterations, tables or {})
    changes = {"status": "complete", "final": dict(final), "fingerprint": fingerprint, "ending": ending}
    return _save(run_dir, current, {**changes, **_noted(current, notes, files)})


def mark(
    run_dir: Path,
    current: Head,
    status: Status,
    notes: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
) -> Head:
    """Note that the run is running, interrupted or failed; digests as in `finish`. UserError where writing fails."""
    _require_open(run_dir, current)
    if status == "complete":
        raise ValueError("a run becomes complete by finish(), which needs its final results")
    return _save(run_dir, current, {"status": status, **_noted(current, notes, files)})


def _noted(current: Head, notes: Mapping[str, str] | None, files: Mapping[str, str] | None) -> dict[str, Any]:
    return {"notes": {**current.notes, **(notes or {})}, "files": dict(current.files if files is None else files)}


def _make_folder(run_dir: Path) -> Path:
    """An empty folder that will become `run_dir`; UserError where something is there."""
    temporary = run_dir.with_name(run_dir.name + ".tmp")
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        require_new(run_dir, manifest.FILE_NAME)
        if temporary.exists():  # of a process that was killed
            shutil.rmtree(temporary)
        temporary.mkdir()
        return temporary
    except FileExistsError as error:
        raise UserError(f"{run_dir}: the file {error.filename} is in the way; choose another --out") from error
    except OSError as error:
        raise UserError(f"{run_dir}: cannot be made ({error.strerror or error}); choose another --out") from error


def require_current_format(run_dir: Path, current: Head) -> None:
    """Raise UserError for a run that an earlier version began; such a run can only be read."""
    if current.manifest_version != manifest.VERSION:
        raise UserError(
            f"{run_dir / manifest.FILE_NAME}: manifest_version = {current.manifest_version}: this ppo_repro writes "
            f"{manifest.VERSION}; finish the run with the version that began it"
        )


def _require_open(run_dir: Path, current: Head) -> None:
    if current.status == "complete":
        raise ValueError("the run is complete; nothing can be added to it")
    require_current_format(run_dir, current)
    if manifest.load_head(run_dir) != manifest.head_of(current):
        raise UserError(f"{run_dir}: the manifest changed meanwhile; let only one process write a run")


def _save(run_dir: Path, current: Head, changes: dict[str, Any]) -> Head:
    # constructed, not copied, so that every field is validated
    changed = Head(**{**dict(manifest.head_of(current)), **changes})
    manifest.save(changed, run_dir)
    return changed


def _as_built(table: schema.Table, data: pa.Table, iteration: int | None) -> schema.Table:
    """The table at the level of its data; ValueError where the data does not belong here."""
    built = schema.as_built(table, data.column_names)
    if data.schema != arrow.arrow_schema(built):
        raise ValueError(f"table {table.name}: has another schema; build it with to_arrow")
    if iteration is None:
        return built
    strangers = np.flatnonzero(data.column("iteration").to_numpy() != iteration)
    if strangers.size:
        raise ValueError(f"table {table.name}: row {strangers[0]} is not of iteration {iteration}")
    return built
