"""The manifest of a run folder: status, rows and digests per table and iteration, fingerprint.

manifest.json is small and replaced as a whole after every iteration. It says how many lines, and how many bytes, of
iterations.jsonl belong to the run: one line an iteration, appended and never changed. What follows them was written
by a process that was killed. It is ignored and overwritten.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import MANIFEST, OWN_DIGEST, atomic_write, is_sealed, open_regular, read_regular, sealed
from ppo_repro.config.kinds import CONTROL, DPO, LANGUAGE, Kind
from ppo_repro.records import digests, schema
from ppo_repro.records.run_state import Status

LOG_NAME = "iterations.jsonl"
VERSION = 4  # of this file; versions 1 to 3 were written by ppo_repro 0.2 and earlier
_DAMAGED = "the manifest was changed or damaged"
_LOG_DAMAGED = "the file was changed or damaged"
# by kind of run: the tables of the fingerprint, and the side tables
_TABLES: dict[Kind, tuple[tuple[schema.Table, ...], tuple[schema.Table, ...]]] = {
    LANGUAGE: (schema.TABLES, schema.SIDE_TABLES),
    CONTROL: (schema.CONTROL_TABLES, ()),
    DPO: (schema.DPO_TABLES, schema.DPO_SIDE_TABLES),
}
_CONFIG = ConfigDict(extra="forbid", strict=True)


# slots: readers keep one entry per table and iteration in memory, and a pydantic model takes 4 times the space
@dataclass(frozen=True, slots=True, config=_CONFIG)
class TableEntry:
    """A recorded file. Entries are equal if the results are equal, even if the files differ because of timings."""

    rows: Annotated[int, Field(ge=0)]
    digest: str  # of the values
    file_digest: str = dataclasses.field(compare=False)  # of the bytes


# runs of earlier versions have a SHA-256 in each line, which the digest of the whole log has made unnecessary
@dataclass(frozen=True, slots=True, config=ConfigDict(extra="ignore", strict=True))
class IterationEntry:
    """A recorded iteration. `chain` follows from the previous iteration's link and the digests of `tables`."""

    iteration: Annotated[int, Field(ge=0)]
    tables: dict[str, TableEntry]
    chain: str
    beside: dict[str, TableEntry] = dataclasses.field(default_factory=dict)  # side tables, which are in no chain


_ENTRY = TypeAdapter(IterationEntry)

FinalResults = dict[str, float | int | str]  # by name; each kind of run has its own results after the last iteration


class Origin(BaseModel, extra="forbid", strict=True, frozen=True):
    """The origin of a fork: the run from which it copied the iterations before `iteration`."""

    run: str  # its folder when the fork was made
    iteration: Annotated[int, Field(ge=1)]  # the first one that the fork computed
    fingerprint: str  # of the other run up to there
    changed: dict[str, list[Any]]  # [before, after] of each field and of each input's SHA-256


class Head(BaseModel, extra="forbid", strict=True, frozen=True):
    """The content of manifest.json without its own digest. A process needs no more memory, however long the run.

    `fingerprint` is the last link of the chain; for a complete run, it is one more link over `final`.
    """

    schema_version: int
    manifest_version: int = VERSION
    kind: Kind = LANGUAGE  # which tables there are
    status: Status
    config_digest: str
    inputs: dict[str, str]  # SHA-256 of copies by name below the run folder, of other inputs by FIELD/FILE
    origin: Origin | None = None  # None unless the run is a fork
    notes: dict[str, str] = Field(default_factory=dict)  # SHA-256 of environment.json and the other notes
    files: dict[str, str] = Field(default_factory=dict)  # SHA-256 of config.yaml, checkpoints, SHA256SUMS of models
    num_iterations: Annotated[int, Field(ge=0)]
    log_bytes: Annotated[int, Field(ge=0)]  # of iterations.jsonl; what follows them does not count
    log_digest: str = ""  # of these bytes, see `extended`
    preparation: dict[str, TableEntry] = Field(default_factory=dict)  # side tables written before the first iteration
    ending: dict[str, TableEntry] = Field(default_factory=dict)  # and after the last one
    final: FinalResults
    fingerprint: str

    @property
    def own_iterations(self) -> range:
        """Return the recorded iterations that the run computed; a fork copied earlier ones, of other settings."""
        return range(0 if self.origin is None else self.origin.iteration, self.num_iterations)


class Manifest(Head):
    """The whole manifest: its head and all recorded iterations."""

    iterations: tuple[IterationEntry, ...]


def note_content(tree: Mapping[str, Any]) -> bytes:
    """Return the JSON content of a note, such as environment.json or times.json."""
    return (json.dumps(tree, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def content_digest(content: bytes | memoryview) -> str:
    """Return the SHA-256 of the content of a file, in hex."""
    return hashlib.sha256(content).hexdigest()


def tables_of(head: Head) -> tuple[schema.Table, ...]:
    """Return the tables of a run, in the order of computation."""
    return _TABLES[head.kind][0]


def side_tables_of(head: Head) -> tuple[schema.Table, ...]:
    """Return the tables outside the fingerprint that a run of this kind may have, in order of computation."""
    return _TABLES[head.kind][1]


def has_responses(head: Head) -> bool:
    """Return whether the run recorded responses; control runs record episodes, DPO runs preference pairs."""
    return head.kind == LANGUAGE


def require_responses(run_dir: Path | str, head: Head) -> None:
    """Raise UserError unless the run recorded responses."""
    if not has_responses(head):
        kind = "DPO" if head.kind == DPO else head.kind
        raise UserError(
            f"{run_dir}: is a {kind} run, which records no responses; give a run of PPO on a language model"
        )


def table_path(run_dir: Path, table_name: str, iteration: int | None) -> Path:
    """Return the file of a table of an iteration. `iteration` None is the moment before the first iteration."""
    moment = "preparation" if iteration is None else f"iteration={iteration:06d}"
    return run_dir / "records" / table_name / f"{moment}.parquet"


@dataclasses.dataclass(frozen=True)
class RecordedTable:
    """A recorded file of a table."""

    table: schema.Table
    iteration: int | None  # None before the first iteration; the number of iterations after the last one
    entry: TableEntry

    def path(self, run_dir: Path) -> Path:
        """Return the path of the file in the run folder."""
        return table_path(run_dir, self.table.name, self.iteration)


def recorded_at(recorded: Manifest, iteration: int | None) -> Iterator[RecordedTable]:
    """Yield the recorded tables of one moment in the order of computation, side tables first.

    `iteration`: None is the moment before the first iteration, the number of iterations the moment after the last.
    """
    entries: Mapping[str, TableEntry] = recorded.preparation if iteration is None else recorded.ending
    if iteration is not None and iteration < recorded.num_iterations:
        entries = {**recorded.iterations[iteration].beside, **recorded.iterations[iteration].tables}
    for table in (*side_tables_of(recorded), *tables_of(recorded)):
        if table.name in entries:
            yield RecordedTable(table, iteration, entries[table.name])


def recorded_tables(recorded: Manifest) -> Iterator[RecordedTable]:
    """Yield every recorded file of a run."""
    for iteration in (None, *range(recorded.num_iterations + 1)):
        yield from recorded_at(recorded, iteration)


def table_names(recorded: Manifest) -> list[str]:
    """Return the names of a run's tables and its recorded side tables."""
    names = [*(table.name for table in tables_of(recorded)), *(f.table.name for f in recorded_tables(recorded))]
    return list(dict.fromkeys(names))


def next_link(previous: str, tables: dict[str, TableEntry]) -> str:
    """Return the chain link of an iteration with these tables, after the link `previous`."""
    return digests.chain(previous, {name: entry.digest for name, entry in tables.items()})


def to_line(entry: IterationEntry) -> bytes:
    """Return the line of an iteration in the log."""
    return bytes(_ENTRY.dump_json(entry, exclude_defaults=True)) + b"\n"


def extended(digest: str, line: bytes) -> str:
    """Return the digest of the log after one more line: the SHA-256 of the digest before and the line.

    The digest of an empty log is an empty text.
    """
    return hashlib.sha256(digest.encode() + line).hexdigest()


def cut_log(run_dir: Path, size: int, data: bytes = b"") -> None:
    """Cut the log to its first `size` bytes, append `data` and flush it to the disk. Raises UserError if that fails.

    The first `size` bytes are safe at any moment. The appended bytes count only once the manifest counts them.
    """
    path = run_dir / LOG_NAME
    try:
        with path.open("r+b") as file:
            file.truncate(size)
            file.seek(size)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); make room there") from error


def read_log(run_dir: Path, count: int, size: int, digest: str) -> tuple[IterationEntry, ...]:
    """Read the iterations that a manifest counts from the log beside it.

    Args:
        count: number of iterations.
        size: their bytes; later bytes belong to an unfinished iteration.
        digest: of these bytes.

    Raises:
        UserError: the log is damaged.
    """
    path = run_dir / LOG_NAME
    try:
        with open_regular(path) as file:
            lines = file.read(size).splitlines(keepends=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); restore it") from error
    if len(lines) != count or reduce(extended, lines, "") != digest:
        raise UserError(f"{path}: is not the {count} lines in {size} bytes that the manifest counts; {_LOG_DAMAGED}")
    return tuple(map(_ENTRY.validate_json, lines))


def finished_fingerprint(last_link: str, final: FinalResults) -> str:
    """Return the fingerprint of a complete run: the link over the final results, after `last_link`."""
    return digests.chain(last_link, {name: digests.scalar_digest(value) for name, value in final.items()})


def save(head: Head, run_dir: Path) -> None:
    """Write manifest.json atomically; final results keep their types and bits. Raises UserError if writing fails."""
    atomic_write(run_dir / MANIFEST, sealed(head.model_dump(exclude={"iterations"})).encode())


def load_head(run_dir: Path) -> Head:
    """Read and check manifest.json alone, in a time that does not depend on the length of the run.

    Raises UserError if it is missing, damaged or of another version.
    """
    path = run_dir / MANIFEST
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such folder; give the folder of a run")
    try:
        text = read_regular(path).decode()
        tree = json.loads(text)
    except FileNotFoundError as error:
        raise UserError(f"{run_dir}: holds no {MANIFEST}; give the folder of a run") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); restore it, or make it readable") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not valid JSON ({' '.join(str(error).split())}); {_DAMAGED}") from error
    if not isinstance(tree, dict) or "schema_version" not in tree:
        raise UserError(f"{path}: is not the manifest of a run; give the folder of a run")
    for name, known in (("schema_version", schema.SCHEMA_VERSION), ("manifest_version", VERSION)):
        if tree.get(name) != known:
            advice = "read the run with the version that wrote it"
            raise UserError(f"{path}: {name} = {tree.get(name)!r}: this ppo_repro reads {known}; {advice}")
    try:
        if not is_sealed(text, tree):
            raise UserError(f"{path}: does not match its own SHA-256; {_DAMAGED}")
        return Head.model_validate_json(json.dumps({k: v for k, v in tree.items() if k != OWN_DIGEST}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(step) for step in first["loc"])
        raise UserError(f"{path}: {field}: {first['msg']}; {_DAMAGED}") from error


def load(run_dir: Path) -> Manifest:
    """Read and check manifest and iterations. Raises UserError if they are missing, damaged or of another version."""
    head = load_head(run_dir)
    iterations = read_log(run_dir, head.num_iterations, head.log_bytes, head.log_digest)
    link, names = digests.FINGERPRINT_SEED, {table.name for table in tables_of(head)}
    for index, entry in enumerate(iterations):
        link = next_link(link, entry.tables)
        if (entry.iteration, entry.chain, entry.tables.keys()) != (index, link, names):
            path = run_dir / LOG_NAME
            raise UserError(f"{path}: line {index + 1} does not follow from its digests; {_LOG_DAMAGED}")
    if head.fingerprint != (finished_fingerprint(link, head.final) if head.status == "complete" else link):
        raise UserError(f"{run_dir / MANIFEST}: fingerprint does not follow from the chain; {_DAMAGED}")
    return Manifest(**dict(head), iterations=iterations)
