"""The manifest of a run folder: status, rows and digests per table and iteration, fingerprint.

manifest.json is small and replaced as a whole after every iteration; it says how much of iterations.jsonl counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ppo_repro.config.kinds import CONTROL, LANGUAGE, Kind
from ppo_repro.errors import UserError
from ppo_repro.files import OWN_DIGEST, atomic_write, is_whole, sealed
from ppo_repro.records import control_schema, digests, iteration_log, schema, side_schema
from ppo_repro.records.iteration_log import IterationEntry, TableEntry, next_link

FILE_NAME = "manifest.json"
_DAMAGED = "the manifest was changed or damaged"
Status = Literal["running", "interrupted", "failed", "complete"]
_TABLES: dict[Kind, tuple[schema.Table, ...]] = {LANGUAGE: schema.TABLES, CONTROL: control_schema.TABLES}
_SIDE_TABLES: dict[Kind, tuple[schema.Table, ...]] = {LANGUAGE: side_schema.SIDE_TABLES, CONTROL: ()}
# of this file: 1 held the iterations itself; 2 had no digest of its own, and none of the bytes of the tables
VERSION: Literal[3] = 3
_VERSIONS = (1, 2, VERSION)
_LATER = {"files", "log_digest", "preparation", "ending"}  # fields that earlier versions did not write


class Head(BaseModel):
    """The content of manifest.json without its own digest; all that a process keeps in memory, however long the run.

    `fingerprint` is the last link of the chain; of a complete run the link over `final` that follows it.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    schema_version: int
    manifest_version: Literal[1, 2, 3] = VERSION
    kind: Kind = LANGUAGE  # which tables there are: of responses and tokens, or of episodes and their steps
    status: Status
    config_digest: str
    inputs: dict[str, str]
    notes: dict[str, str] = Field(default_factory=dict)  # SHA-256 of environment.json and the other notes
    files: dict[str, str] = Field(default_factory=dict)  # SHA-256 of config.yaml and of the SHA256SUMS of models
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
    return _TABLES[head.kind]


def has_responses(head: Head) -> bool:
    """Whether the sequences are responses of a language model; otherwise they are steps in an environment."""
    return head.kind == LANGUAGE


def table_path(run_dir: Path, table_name: str, iteration: int) -> Path:
    """The file of one table of one iteration."""
    return run_dir / "records" / table_name / f"iteration={iteration:06d}.parquet"


def recorded_path(run_dir: Path, table_name: str, entry: IterationEntry) -> Path:
    """The file that has one table of a recorded iteration, and perhaps of its neighbours."""
    first = entry.iteration if entry.first_in_file is None else entry.first_in_file
    return table_path(run_dir, table_name, first)


@dataclass(frozen=True)
class SideFile:
    """One recorded file of a side table."""

    table: schema.Table
    iteration: int | None  # None before the first iteration; the number of iterations after the last one
    entry: TableEntry

    def path(self, run_dir: Path) -> Path:
        """Where it lies."""
        return side_path(run_dir, self.table.name, self.iteration)


def side_tables_of(head: Head) -> tuple[schema.Table, ...]:
    """The tables outside the fingerprint that a run of this kind may have, in the order in which they are computed."""
    return _SIDE_TABLES[head.kind]


def side_path(run_dir: Path, table_name: str, iteration: int | None) -> Path:
    """The file of a side table; without `iteration` the one written before the first iteration."""
    if iteration is None:
        return run_dir / "records" / table_name / "preparation.parquet"
    return table_path(run_dir, table_name, iteration)


def side_files(recorded: Manifest) -> Iterator[SideFile]:
    """Every recorded file of a side table, in the order in which they were computed."""
    moments = [(None, recorded.preparation), *((entry.iteration, entry.beside) for entry in recorded.iterations)]
    for iteration, entries in (*moments, (recorded.num_iterations, recorded.ending)):
        for table in side_tables_of(recorded):
            if table.name in entries:
                yield SideFile(table, iteration, entries[table.name])


def head_of(head: Head) -> Head:
    """The manifest without its iterations."""
    return Head(**{name: getattr(head, name) for name in Head.model_fields})


def finished_fingerprint(last_link: str, final: Mapping[str, float | int | str]) -> str:
    """The fingerprint of a complete run: one more link, over the final results."""
    return digests.chain(last_link, {name: digests.scalar_digest(value) for name, value in final.items()})


def expected_fingerprint(manifest: Manifest) -> str:
    """The fingerprint that follows from the chain, the status and the final results."""
    last = manifest.iterations[-1].chain if manifest.iterations else digests.FINGERPRINT_SEED
    return finished_fingerprint(last, manifest.final) if manifest.status == "complete" else last


def to_json(head: Head) -> str:
    """The text of the file; final results keep their type, floats their bits (a NaN stays a NaN)."""
    return sealed(head_of(head).model_dump())


def is_covered(head: Head) -> bool:
    """Whether the digests cover every byte of the run; in earlier versions they cover values and some files."""
    return head.manifest_version == VERSION


def save(head: Head, run_dir: Path) -> None:
    """Write manifest.json atomically; raises UserError where that fails."""
    atomic_write(run_dir / FILE_NAME, to_json(head).encode())


def load_head(run_dir: Path) -> Head:
    """Read and check manifest.json alone, in a time that does not depend on the length of the run.

    UserError where it is missing, damaged or of another version.
    """
    path = run_dir / FILE_NAME
    tree = _tree(run_dir, path)
    if tree["manifest_version"] == 1:
        return head_of(_of_version_1(path, tree))
    return _checked(Head, path, tree)


def load(run_dir: Path) -> Manifest:
    """Read and check manifest and iterations; UserError where they are missing, damaged or of another version."""
    path = run_dir / FILE_NAME
    tree = _tree(run_dir, path)
    if tree["manifest_version"] == 1:
        return _of_version_1(path, tree)
    head = _checked(Head, path, tree)
    digest = head.log_digest if is_covered(head) else None
    iterations = iteration_log.read(run_dir, head.num_iterations, head.log_bytes, digest)
    manifest = Manifest(**dict(head), iterations=iterations)
    _require_consistent(run_dir / iteration_log.FILE_NAME, path, manifest)
    return manifest


_Model = TypeVar("_Model", bound=Head)


def _of_version_1(path: Path, tree: dict[str, Any]) -> Manifest:
    """A manifest that holds its iterations itself."""
    iterations = tree.get("iterations")
    tree = {**tree, "num_iterations": len(iterations) if isinstance(iterations, list) else 0, "log_bytes": 0}
    manifest = _checked(Manifest, path, tree)
    _require_consistent(path, path, manifest)
    return manifest


def _checked(model: type[_Model], path: Path, tree: dict[str, Any]) -> _Model:
    try:
        return model.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(step) for step in first["loc"])
        raise UserError(f"{path}: {field}: {first['msg']}; {_DAMAGED}") from error


def _tree(run_dir: Path, path: Path) -> dict[str, Any]:
    tree = _read_json(run_dir, path)
    if not isinstance(tree, dict) or not {"schema_version", OWN_DIGEST} & tree.keys():
        raise UserError(f"{path}: is not the manifest of a run; give the folder of a run")
    is_sealed = tree.pop(OWN_DIGEST, None) is not None
    tree.setdefault("manifest_version", 1)
    for name, known in (("schema_version", (schema.SCHEMA_VERSION,)), ("manifest_version", _VERSIONS)):
        if tree.get(name) not in known:
            allowed = " and ".join(map(str, known))
            advice = "read the run with the version that wrote it"
            raise UserError(f"{path}: {name} = {tree.get(name)!r}: this ppo_repro reads {allowed}; {advice}")
    if not is_sealed and (tree["manifest_version"] == VERSION or _LATER & tree.keys()):
        raise UserError(f"{path}: has no digest of its own; {_DAMAGED}")
    return tree


def _read_json(run_dir: Path, path: Path) -> Any:
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such folder; give the folder of a run")
    try:
        text = path.read_bytes().decode()
        tree = json.loads(text)
        undamaged = not (isinstance(tree, dict) and OWN_DIGEST in tree) or is_whole(text, tree)
    except FileNotFoundError as error:
        raise UserError(f"{run_dir}: holds no {FILE_NAME}; give the folder of a run") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); restore it, or make it readable") from error
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: is not valid JSON ({reason}); {_DAMAGED}") from error
    if not undamaged:
        raise UserError(f"{path}: does not match its own SHA-256; {_DAMAGED}")
    return tree


def _require_consistent(log: Path, path: Path, manifest: Manifest) -> None:
    """Raise UserError where the manifest contradicts itself. `log`: the file that holds the iterations."""
    problem = _log_inconsistency(manifest)
    if problem:
        raise UserError(f"{log}: {problem}; {iteration_log.DAMAGED}")
    if manifest.final and manifest.status != "complete":
        raise UserError(f"{path}: status = {manifest.status!r} but final results are there; {_DAMAGED}")
    strangers = {*manifest.preparation, *manifest.ending} - {table.name for table in side_tables_of(manifest)}
    listed = (*manifest.preparation.values(), *manifest.ending.values())
    if is_covered(manifest) and any(table.file_digest is None for table in listed):
        raise UserError(f"{path}: lists a side table without the digest of its bytes; {_DAMAGED}")
    if strangers or (manifest.ending and manifest.status != "complete"):
        names = ", ".join(sorted(strangers or manifest.ending))
        raise UserError(f"{path}: lists tables {names} that this run cannot have; {_DAMAGED}")
    if manifest.fingerprint != expected_fingerprint(manifest):
        raise UserError(
            f"{path}: fingerprint = {manifest.fingerprint!r} does not follow from the chain and the final results; "
            f"{_DAMAGED}"
        )


def _log_inconsistency(manifest: Manifest) -> str:
    names = {table.name for table in tables_of(manifest)}
    side_names = {table.name for table in side_tables_of(manifest)}
    previous, first = digests.FINGERPRINT_SEED, None
    for index, entry in enumerate(manifest.iterations):
        if entry.iteration != index:
            return f"iterations.{index} is iteration {entry.iteration}, expected {index}"
        if set(entry.tables) != names:
            return f"iteration {index} lists tables {sorted(entry.tables)}, expected {sorted(names)}"
        listed = (*entry.tables.values(), *entry.beside.values())
        if is_covered(manifest) and any(table.file_digest is None for table in listed):
            return f"iteration {index} lists a file without the digest of its bytes"
        if not side_names.issuperset(entry.beside):
            return f"iteration {index} lists side tables {sorted(entry.beside)}, allowed are {sorted(side_names)}"
        if entry.first_in_file not in (None, index, first):
            return f"iteration {index} lies in files of iteration {entry.first_in_file}, which others begin"
        first = entry.first_in_file
        if entry.chain != next_link(previous, entry.tables):
            return f"chain of iteration {index} = {entry.chain!r} does not follow from its digests"
        previous = entry.chain
    return ""
