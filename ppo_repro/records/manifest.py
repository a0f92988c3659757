"""What a run folder says about itself: status, rows and digests per table and iteration, fingerprint."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from ppo_repro.errors import UserError
from ppo_repro.records import control_schema, digests, schema

FILE_NAME = "manifest.json"
_DAMAGED = "the manifest was changed or damaged"
Status = Literal["running", "interrupted", "failed", "complete"]
Kind = Literal["language", "control"]
_TABLES: dict[Kind, tuple[schema.Table, ...]] = {"language": schema.TABLES, "control": control_schema.TABLES}


_CONFIG = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")


# slots: a run keeps one entry per table and iteration in memory, and a pydantic model takes 4 times the space
@dataclass(frozen=True, slots=True, config=_CONFIG)
class TableEntry:
    """One recorded file."""

    rows: Annotated[int, Field(ge=0)]
    digest: str


@dataclass(frozen=True, slots=True, config=_CONFIG)
class IterationEntry:
    """One recorded iteration; `chain` follows from the iteration before and the digests here."""

    iteration: Annotated[int, Field(ge=0)]
    tables: dict[str, TableEntry]
    chain: str


class Manifest(BaseModel):
    """The whole run; `fingerprint` is the last chain link, once complete the one over `final` too."""

    model_config = ConfigDict(**_CONFIG, frozen=True)

    schema_version: int
    kind: Kind = "language"  # which tables there are: of responses and tokens, or of episodes and their steps
    status: Status
    config_digest: str
    inputs: dict[str, str]
    notes: dict[str, str] = Field(default_factory=dict)  # SHA-256 of environment.json and of each resumed-NNN.json
    iterations: tuple[IterationEntry, ...]
    final: dict[str, float | int | str]
    fingerprint: str


def note_content(tree: Mapping[str, Any]) -> bytes:
    """The content of environment.json or of a resumed-NNN.json."""
    return (json.dumps(tree, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def note_digest(content: bytes) -> str:
    """SHA-256 of such a file, as `Manifest.notes` has it."""
    return hashlib.sha256(content).hexdigest()


def tables_of(found: Manifest) -> tuple[schema.Table, ...]:
    """The tables of a run, in the order in which their data comes to be."""
    return _TABLES[found.kind]


def table_path(run_dir: Path, table_name: str, iteration: int) -> Path:
    """Where one table of one iteration lies."""
    return run_dir / "records" / table_name / f"iteration={iteration:06d}.parquet"


def last_link(iterations: tuple[IterationEntry, ...]) -> str:
    """The chain up to here; the seed where nothing is recorded."""
    return iterations[-1].chain if iterations else digests.FINGERPRINT_SEED


def next_link(previous: str, tables: dict[str, TableEntry]) -> str:
    """The chain link of an iteration that follows the link `previous`."""
    return digests.chain(previous, {name: entry.digest for name, entry in tables.items()})


def expected_fingerprint(manifest: Manifest) -> str:
    """The fingerprint that follows from the chain, the status and the final results."""
    last = last_link(manifest.iterations)
    if manifest.status != "complete":
        return last
    return digests.chain(last, {name: digests.scalar_digest(value) for name, value in manifest.final.items()})


def atomic_write(path: Path, data: bytes | memoryview) -> None:
    """Write the whole file or leave what was there; raises UserError with path and reason."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        # a link in its place would be written through, out of the folder
        with open(temporary, "wb", opener=_without_links) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        # the first error is the one to report
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        reason = error.strerror or str(error)
        advice = "make room there or choose another --out"
        raise UserError(f"{path}: cannot be written ({reason}); {advice}") from error


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut; raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_json(manifest: Manifest) -> str:
    """The text of the file; final results keep their type, floats their bits (NaN its being NaN)."""
    return manifest.model_dump_json(indent=1) + "\n"


def from_json(text: str) -> Manifest:
    """The manifest that `to_json` wrote; raises ValidationError on anything else."""
    return Manifest.model_validate_json(text)


def save(manifest: Manifest, run_dir: Path) -> None:
    """Write the manifest atomically; raises UserError where that fails."""
    atomic_write(run_dir / FILE_NAME, to_json(manifest).encode())


def is_on_disk(manifest: Manifest, run_dir: Path) -> bool:
    """Whether the file says what `manifest` says; UserError as `load`, which is asked only where the text differs."""
    try:
        if (run_dir / FILE_NAME).read_bytes() == to_json(manifest).encode():
            return True
    except OSError:
        pass  # `load` names it
    return load(run_dir) == manifest


def load(run_dir: Path) -> Manifest:
    """Read and check the manifest; raises UserError where it is missing, damaged or of another version."""
    path = run_dir / FILE_NAME
    tree = _read_json(run_dir, path)
    if not isinstance(tree, dict) or "schema_version" not in tree:
        raise UserError(f"{path}: is not the manifest of a run; give the folder of a run")
    if tree["schema_version"] != schema.SCHEMA_VERSION:
        raise UserError(
            f"{path}: schema_version = {tree['schema_version']!r}: this ppo_repro reads "
            f"{schema.SCHEMA_VERSION}; read the run with the version that wrote it"
        )
    try:
        manifest = from_json(json.dumps(tree))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(step) for step in first["loc"])
        raise UserError(f"{path}: {field}: {first['msg']}; {_DAMAGED}") from error
    problem = _inconsistency(manifest)
    if problem:
        raise UserError(f"{path}: {problem}; {_DAMAGED}")
    return manifest


def _read_json(run_dir: Path, path: Path) -> Any:
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such folder; give the folder of a run")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{run_dir}: holds no {FILE_NAME}; give the folder of a run") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); make it readable") from error
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: is not valid JSON ({reason}); {_DAMAGED}") from error


def _inconsistency(manifest: Manifest) -> str:
    names = {table.name for table in tables_of(manifest)}
    previous = digests.FINGERPRINT_SEED
    for index, entry in enumerate(manifest.iterations):
        if entry.iteration != index:
            return f"iterations.{index} is iteration {entry.iteration}, expected {index}"
        if set(entry.tables) != names:
            return f"iteration {index} lists tables {sorted(entry.tables)}, expected {sorted(names)}"
        if entry.chain != next_link(previous, entry.tables):
            return f"chain of iteration {index} = {entry.chain!r} does not follow from its digests"
        previous = entry.chain
    if manifest.final and manifest.status != "complete":
        return f"status = {manifest.status!r} but final results are there"
    if manifest.fingerprint != expected_fingerprint(manifest):
        return f"fingerprint = {manifest.fingerprint!r} does not follow from the chain and the final results"
    return ""
