"""Write a run: files first, then the manifest that lists them, so that a killed run stays readable."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import atomic_write, make_folder, require_new, sync, sync_tree
from ppo_repro.config.files import dump_yaml
from ppo_repro.config.inputs import Inputs
from ppo_repro.config.kinds import Kind
from ppo_repro.records import arrow, digests, manifest, schema
from ppo_repro.records.folder import CONFIG_NAME, ENVIRONMENT_NAME
from ppo_repro.records.manifest import FinalResults, Head, IterationEntry, TableEntry, next_link
from ppo_repro.records.run_state import Status


def lay_out_run(
    run_dir: Path,
    inputs: Inputs,
    environment: Mapping[str, Any],
    config_digest: str,
    kind: Kind,
) -> Path:
    """Make a run folder with an empty manifest under a temporary name, and return its path.

    `publish_run` renames the folder, so that the run appears completely or not at all. The caller has the lock of
    `run_dir`.

    Args:
        run_dir: the final name of the folder.
        environment: for the note environment.json.

    Raises:
        UserError: the folder exists or cannot be written.
    """
    read_from = {"inputs": {name: str(path) for name, path in inputs.copies.items()}} if inputs.copies else {}
    note, config = manifest.note_content({**environment, **read_from}), dump_yaml(inputs.config).encode()
    head = Head(
        schema_version=schema.SCHEMA_VERSION,
        kind=kind,
        status="running",
        config_digest=config_digest,
        inputs=dict(sorted(inputs.digests.items())),
        notes={ENVIRONMENT_NAME: manifest.content_digest(note)},
        files={CONFIG_NAME: manifest.content_digest(config), **{name: inputs.digests[name] for name in inputs.copies}},
        num_iterations=0,
        log_bytes=0,
        final={},
        fingerprint=digests.FINGERPRINT_SEED,
    )
    temporary = run_dir.with_name(run_dir.name + ".tmp")
    try:
        make_folder(run_dir.parent)
        require_new(run_dir)
        if temporary.exists():  # of a killed process: this one has the run's lock
            shutil.rmtree(temporary)
        for table in manifest.tables_of(head):
            (temporary / "records" / table.name).mkdir(parents=True)
        for name, path in inputs.copies.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes()
            if manifest.content_digest(content) != inputs.digests[name]:
                raise UserError(f"{path}: changed while the run began; start it again")
            atomic_write(temporary / name, content)
        atomic_write(temporary / CONFIG_NAME, config)
        atomic_write(temporary / ENVIRONMENT_NAME, note)
        atomic_write(temporary / manifest.LOG_NAME, b"")
        manifest.save(head, temporary)
    except FileExistsError as error:
        raise UserError(f"{run_dir}: the file {error.filename} is in the way; choose another --out") from error
    except OSError as error:
        raise UserError(f"{run_dir}: cannot be made ({error.strerror}); choose another --out") from error
    return temporary


def publish_run(temporary: Path, run_dir: Path) -> None:
    """Rename the folder that `lay_out_run` made to `run_dir`. Raises UserError if that fails."""
    try:
        sync_tree(temporary)
        os.rename(temporary, run_dir)
        sync(run_dir.parent)
    except OSError as error:
        raise _cannot_write(run_dir, error) from error


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be written ({error.strerror}); choose another --out")


class RunWriter:
    """Writes into one run folder, whose lock this process has. Its methods raise UserError if writing fails.

    `head` is the manifest as it is on disk.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.head = manifest.load_head(run_dir)

    def prepare(self, tables: Mapping[str, pa.Table]) -> None:
        """Record the tables of the training before the first iteration."""
        self._save({"preparation": {**self.head.preparation, **self._written(None, tables)}})

    def append(self, iteration: int, tables: Mapping[str, pa.Table]) -> None:
        """Record the next iteration: its tables, then its line in the log, then the manifest, which counts it."""
        head, entries = self.head, self._written(iteration, tables)
        assert head.status == "running"
        assert head.num_iterations == iteration
        results = {table.name: entries.pop(table.name) for table in manifest.tables_of(head)}
        # the fingerprint of an incomplete run is the last link of its chain
        link = next_link(head.fingerprint, results)
        line = manifest.to_line(IterationEntry(iteration, results, link, entries))
        manifest.cut_log(self.run_dir, head.log_bytes, line)
        self._save(
            {
                "num_iterations": iteration + 1,
                "log_bytes": head.log_bytes + len(line),
                "log_digest": manifest.extended(head.log_digest, line),
                "fingerprint": link,
            }
        )

    def note(self, name: str, tree: Mapping[str, Any]) -> None:
        """Write a JSON file beside the records, outside the fingerprint."""
        content = manifest.note_content(tree)
        if name in self.head.notes:  # a kill between the next two lines must not leave a file with another digest
            self._save({"notes": {other: digest for other, digest in self.head.notes.items() if other != name}})
        atomic_write(self.run_dir / name, content)
        self._save({"notes": {**self.head.notes, name: manifest.content_digest(content)}})

    def list_files(self, files: Mapping[str, str]) -> None:
        """List exactly these files in the manifest: SHA-256 by path relative to the run folder."""
        if files != self.head.files:
            self._save({"files": dict(files)})

    def keep_only(self, files: Mapping[str, str]) -> None:
        """List exactly these files in the manifest, and remove the files that are no longer listed."""
        gone = sorted(self.head.files.keys() - files.keys())
        self.list_files(files)
        try:
            for name in gone:
                (self.run_dir / name).unlink()
            for folder in {(self.run_dir / name).parent for name in gone}:
                sync(folder)  # before the run is complete, whose folder has nothing that is not listed
        except OSError as error:
            raise UserError(f"{self.run_dir}: cannot be changed ({error.strerror}); make it writable") from error

    def mark(self, status: Status) -> None:
        """Write into the manifest that the run is running, interrupted or failed."""
        self._save({"status": status})

    def finish(self, final: FinalResults, tables: Mapping[str, pa.Table]) -> None:
        """Close the run with its final results and the tables after the last iteration.

        Raises ValueError for other results.
        """
        for name, value in final.items():
            # pydantic would turn numpy integers into floats
            if type(value) not in (float, int, str):
                raise ValueError(f"final result {name} is a {type(value).__name__}, expected float, int or str")
        fingerprint = manifest.finished_fingerprint(self.head.fingerprint, final)
        ending = self._written(self.head.num_iterations, tables)
        self._save({"status": "complete", "final": dict(final), "fingerprint": fingerprint, "ending": ending})

    def _written(self, iteration: int | None, tables: Mapping[str, pa.Table]) -> dict[str, TableEntry]:
        """Write one file of each table, and return their entries."""
        known = {t.name: t for t in (*manifest.tables_of(self.head), *manifest.side_tables_of(self.head))}
        entries = {}
        for name, data in tables.items():
            content, path = arrow.to_parquet(data), manifest.table_path(self.run_dir, name, iteration)
            digest = digests.table_digest(known[name], data)
            try:
                make_folder(path.parent)
            except OSError as error:
                raise _cannot_write(path.parent, error) from error
            atomic_write(path, content)
            entries[name] = TableEntry(data.num_rows, digest, manifest.content_digest(content))
        return entries

    def _save(self, changes: Mapping[str, Any]) -> None:
        assert self.head.status != "complete"
        # constructed, not copied, so that every field is validated
        changed = Head(**{**dict(self.head), **changes})
        manifest.save(changed, self.run_dir)
        self.head = changed
