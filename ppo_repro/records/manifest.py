"""The manifest of a run folder: status, rows and digests per table and iteration, fingerprint.

manifest.json is small and replaced as a whole after every iteration; it says how much of iterations.jsonl counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ppo_repro.config.files import CONTROL, DPO, LANGUAGE, Kind
from ppo_repro.errors import UserError
from ppo_repro.files import OWN_DIGEST, atomic_write, is_whole, sealed
from ppo_repro.records import control_schema, digests, dpo_schema, iteration_log, schema
from ppo_repro.records.iteration_log import IterationEntry, TableEntry, next_link

FILE_NAME = "manifest.json"
VERSION = 4  # of this file; versions 1 to 3 were written by ppo_repro 0.2 and earlier
_DAMAGED = "the manifest was changed or damaged"
Status = Literal["running", "interrupted", "failed", "complete"]
# the tables of the fingerprint, and side tables
_TABLES: dict[Kind, tuple[tuple[schema.Table, ...], tuple[schema.Table, ...]]] = {
    LANGUAGE: (schema.TABLES, schema.SIDE_TABLES),
    CONTROL: (control_schema.TABLES, ()),
    DPO: (dpo_schema.TABLES, dpo_schema.SIDE_TABLES),
}


class Origin(BaseModel):
    """Where a forked run comes from: the iterations before `iteration` are those of the other run."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    run: str  # its folder when the fork was made
    iteration: Annotated[int, Field(ge=1)]  # the first one that the fork computed
    fingerprint: str  # of the other run up to there
    changed: dict[str, list[Any]]  # [before, after] of each field and of each input's SHA-256


class Head(BaseModel):
    """The content of manifest.json without its own digest; all that a process keeps in memory, however long the run.

    `fingerprint` is the last link of the chain; of a complete run the link over `final` that follows it.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    schema_version: int
    manifest_version: int = VERSION
    kind: Kind = LANGUAGE  # which tables there are: of responses and tokens, or of episodes and their steps
    status: Status
    config_digest: str
    inputs: dict[str, str]  # SHA-256 of copies by name below the run folder, of other inputs by FIELD/FILE
    origin: Origin | None = None  # None unless the run is a fork
    notes: dict[str, str] = Field(default_factory=dict)  # SHA-256 of environment.json and the other notes
    files: dict[str, str] = Field(default_factory=dict)  # SHA-256 of config.yaml, checkpoints, SHA256SUMS of models
    num_iterations: Annotated[int, Field(ge=0)]
    log_bytes: Annotated[int, Field(ge=0)]  # of iterations.jsonl; what follows them does not count
    log_digest: str = ""  # of these bytes, see `iteration_log.extended`
    preparation: dict[str, TableEntry] = Field(default_factory=dict)  # side tables written before the first iteration
    ending: dict[str, TableEntry] = Field(default_factory=dict)  # and after the last one
    final: dict[str, float | int | str]
    fingerprint: str


class Manifest(Head):
    """The whole run, as readers have it."""

    iterations: tuple[IterationEntry, ...]


def note_content(tree: Mapping[str, Any]) -> bytes:
    """The content of environment.json, accuracy.json, times.json or a resumed-NNN.json."""
    return (json.dumps(tree, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def content_digest(content: bytes | memoryview) -> str:
    """SHA-256 of the bytes of a file, as the manifest has it."""
    return hashlib.sha256(content).hexdigest()


def tables_of(head: Head) -> tuple[schema.Table, ...]:
    """The tables of a run, in the order in which their data is computed."""
    return _TABLES[head.kind][0]


def side_tables_of(head: Head) -> tuple[schema.Table, ...]:
    """The tables outside the fingerprint that a run of this kind may have, in the order in which they are computed."""
    return _TABLES[head.kind][1]


def has_responses(head: Head) -> bool:
    """Whether the sequences are responses of a language model; otherwise they are steps in an environment."""
    return head.kind == LANGUAGE


def table_path(run_dir: Path, table_name: str, iteration: int | None) -> Path:
    """The file of one table of one iteration; None: of what came before the first iteration."""
    moment = "preparation" if iteration is None else f"iteration={iteration:06d}"
    return run_dir / "records" / table_name / f"{moment}.parquet"


@dataclass(frozen=True)
class RecordedTable:
    """One recorded file of a table."""

    table: schema.Table
    iteration: int | None  # None before the first iteration; the number of iterations after the last one
    entry: TableEntry

    def path(self, run_dir: Path) -> Path:
        """Where it lies."""
        return table_path(run_dir, self.table.name, self.iteration)


def recorded_at(recorded: Manifest, iteration: int | None) -> Iterator[RecordedTable]:
    """The recorded tables of one moment in the order of computation, side tables first.

    `iteration`: None before the first one, the number of iterations after the last one.
    """
    entries: Mapping[str, TableEntry] = recorded.preparation if iteration is None else recorded.ending
    if iteration is not None and iteration < recorded.num_iterations:
        entries = {**recorded.iterations[iteration].beside, **recorded.iterations[iteration].tables}
    for table in (*side_tables_of(recorded), *tables_of(recorded)):
        if table.name in entries:
            yield RecordedTable(table, iteration, entries[table.name])


def recorded_tables(recorded: Manifest) -> Iterator[RecordedTable]:
    """Every recorded file of a run."""
    for iteration in (None, *range(recorded.num_iterations + 1)):
        yield from recorded_at(recorded, iteration)


def side_files(recorded: Manifest) -> Iterator[RecordedTable]:
    """Every recorded file of a side table, in the order in which they were computed."""
    side = {table.name for table in side_tables_of(recorded)}
    return (file for file in recorded_tables(recorded) if file.table.name in side)


def head_of(head: Head) -> Head:
    """The manifest without its iterations."""
    return Head(**{name: getattr(head, name) for name in Head.model_fields})


def finished_fingerprint(last_link: str, final: Mapping[str, float | int | str]) -> str:
    """The fingerprint of a complete run: one more link, over the final results."""
    return digests.chain(last_link, {name: digests.scalar_digest(value) for name, value in final.items()})


def save(head: Head, run_dir: Path) -> None:
    """Write manifest.json atomically; final results keep their type, floats their bits. UserError if writing fails."""
    atomic_write(run_dir / FILE_NAME, sealed(head_of(head).model_dump()).encode())


def load_head(run_dir: Path) -> Head:
    """Read and check manifest.json alone, in a time that does not depend on the length of the run.

    UserError where it is missing, damaged or of another version.
    """
    path = run_dir / FILE_NAME
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such folder; give the folder of a run")
    try:
        text = path.read_bytes().decode()
        tree = json.loads(text)
    except FileNotFoundError as error:
        raise UserError(f"{run_dir}: holds no {FILE_NAME}; give the folder of a run") from error
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
        if not is_whole(text, tree):
            raise UserError(f"{path}: does not match its own SHA-256; {_DAMAGED}")
        return Head.model_validate_json(json.dumps({k: v for k, v in tree.items() if k != OWN_DIGEST}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(step) for step in first["loc"])
        raise UserError(f"{path}: {field}: {first['msg']}; {_DAMAGED}") from error


def load(run_dir: Path) -> Manifest:
    """Read and check manifest and iterations; UserError where they are missing, damaged or of another version."""
    head = load_head(run_dir)
    iterations = iteration_log.read(run_dir, head.num_iterations, head.log_bytes, head.log_digest)
    link, names = digests.FINGERPRINT_SEED, {table.name for table in tables_of(head)}
    for index, entry in enumerate(iterations):
        link = next_link(link, entry.tables)
        if (entry.iteration, entry.chain, entry.tables.keys()) != (index, link, names):
            path = run_dir / iteration_log.FILE_NAME
            raise UserError(f"{path}: line {index + 1} does not follow from its digests; {iteration_log.DAMAGED}")
    if head.fingerprint != (finished_fingerprint(link, head.final) if head.status == "complete" else link):
        raise UserError(f"{run_dir / FILE_NAME}: fingerprint does not follow from the chain; {_DAMAGED}")
    return Manifest(**dict(head), iterations=iterations)
