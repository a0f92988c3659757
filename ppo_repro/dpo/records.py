"""What a DPO training leaves on disk: two tables and a manifest with their digests. Never imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from ppo_repro.clock import from_text
from ppo_repro.errors import UserError
from ppo_repro.files import OWN_DIGEST, SUMS_NAME, atomic_write, check_links, check_sums, file_digest, is_whole, sealed
from ppo_repro.records import arrow, digests, manifest, reader
from ppo_repro.records.config_file import CONFIG_NAME, ENVIRONMENT_NAME, read_checked
from ppo_repro.records.contents import CHECKPOINTS_NAME, REPORT_NAME, final_folder
from ppo_repro.records.iteration_log import TableEntry
from ppo_repro.records.schema import Column, Table
from ppo_repro.records.times import STARTED

FORMAT = 2  # 1 had no digest of the manifest itself, and none of the other files
ENDED = "ended"  # when the training ended, in its environment.json
FILES = (CONFIG_NAME, ENVIRONMENT_NAME, f"{CHECKPOINTS_NAME}/final/{SUMS_NAME}")
_DAMAGED = "the manifest was changed or damaged"

PAIRS = Table(
    "dpo_pairs",
    "one row per preference pair",
    ("pair",),
    (
        Column("pair", "int32", "index", "Training pairs first, then held-out ones."),
        Column("held_out", "bool", "", "Not trained on."),
        Column("prompt_key", "string", "", "Stable name of the prompt in its task."),
        Column("prompt_ids", "list<int32>", "token id", "Prompt tokens."),
        Column("chosen_ids", "list<int32>", "token id", "Preferred response, end token included."),
        Column("rejected_ids", "list<int32>", "token id", "The other response."),
        Column("ref_chosen_logprobs", "float64", "nats", "Log-prob of the preferred response under the reference."),
        Column("ref_rejected_logprobs", "float64", "nats", "The same of the other response."),
        Column("chosen_logprobs", "float64", "nats", "Log-prob of the preferred response under the trained policy."),
        Column("rejected_logprobs", "float64", "nats", "The same of the other response."),
        Column("margins", "float64", "reward", "Difference of the implicit rewards after training."),
    ),
)
STEPS = Table(
    "dpo_steps",
    "one row per optimizer step",
    ("epoch", "minibatch"),
    (
        Column("epoch", "int32", "index", "Pass over the pairs, from 0."),
        Column("minibatch", "int32", "index", "Minibatch within the epoch, from 0."),
        Column("pairs", "int32", "count", "Pairs in the minibatch."),
        Column("loss", "float64", "nats", "DPO loss before the step, mean over pairs."),
        Column("margin", "float64", "reward", "Difference of the implicit rewards before the step, mean over pairs."),
        Column("accuracy", "float64", "", "Share of pairs with a positive margin; one half for a margin of 0."),
        Column("grad_norm", "float64", "", "Global gradient norm before clipping."),
        Column("digest", "string", "", "Digest of the policy weights after the step."),
    ),
)
TABLES = (PAIRS, STEPS)


class DPOManifest(BaseModel):
    """Digests of the tables and the final results; `fingerprint` follows from both."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: int
    config_digest: str
    run_fingerprint: str  # of the recorded run the pairs are from
    tables: dict[str, TableEntry]
    files: dict[str, str]  # SHA-256 of the configuration, the notes and the SHA256SUMS of the policy
    final: dict[str, float | int | str]
    fingerprint: str


def _fingerprint(tables: Mapping[str, TableEntry], final: Mapping[str, float | int | str]) -> str:
    links = digests.chain(digests.FINGERPRINT_SEED, {name: entry.digest for name, entry in tables.items()})
    return digests.chain(links, {name: digests.scalar_digest(value) for name, value in final.items()})


def table_path(folder: Path, name: str) -> Path:
    """Where a table lies."""
    return folder / "records" / f"{name}.parquet"


def write(
    folder: Path,
    config_digest: str,
    run_fingerprint: str,
    columns: Mapping[str, Mapping[str, Any]],
    final: Mapping[str, float | int | str],
) -> DPOManifest:
    """Write both tables and, over all that lies in `folder`, the manifest; ValueError on columns that do not belong."""
    files = {name: file_digest(folder / name) for name in FILES}
    (folder / "records").mkdir()
    entries = {}
    for table in TABLES:
        data = arrow.to_arrow(table, columns[table.name])
        content = arrow.to_parquet(data)
        values, of_bytes = digests.table_digest(table, data), manifest.content_digest(content)
        entries[table.name] = TableEntry(rows=data.num_rows, digest=values, file_digest=of_bytes)
        atomic_write(table_path(folder, table.name), content)
    made = DPOManifest(
        format=FORMAT,
        config_digest=config_digest,
        run_fingerprint=run_fingerprint,
        tables=entries,
        files=files,
        final=dict(final),
        fingerprint=_fingerprint(entries, final),
    )
    atomic_write(folder / manifest.FILE_NAME, sealed(made.model_dump()).encode())
    return made


def is_dpo(folder: Path) -> bool:
    """Whether a folder is one of a DPO training: its manifest has a format instead of a schema version."""
    try:
        tree = json.loads((folder / manifest.FILE_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False  # who reads it as that of a run names what is wrong
    return isinstance(tree, dict) and "format" in tree and "schema_version" not in tree


def load(folder: Path) -> DPOManifest:
    """The manifest of a DPO folder; UserError where it is missing, damaged or of another format."""
    path = folder / manifest.FILE_NAME
    try:
        text = path.read_bytes().decode()
        tree = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not the manifest of a DPO training; give the folder of one") from error
    if not isinstance(tree, dict) or "format" not in tree:
        raise UserError(f"{path}: is not the manifest of a DPO training; give the folder of one")
    if tree["format"] != FORMAT:
        raise UserError(f"{path}: format = {tree['format']!r}; this ppo_repro reads {FORMAT} alone")
    try:
        if not is_whole(text, tree):
            raise UserError(f"{path}: does not match its own SHA-256; {_DAMAGED}")
        tree.pop(OWN_DIGEST)
        recorded = DPOManifest.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        raise UserError(f"{path}: is not the manifest of a DPO training; {_DAMAGED}") from error
    if recorded.fingerprint != _fingerprint(recorded.tables, recorded.final):
        raise UserError(f"{path}: fingerprint does not follow from the digests; {_DAMAGED}")
    return recorded


def read_table(folder: Path, name: str) -> pd.DataFrame:
    """`dpo_pairs` or `dpo_steps`, checked against the manifest; UserError where it is missing or damaged."""
    table = next(t for t in TABLES if t.name == name)
    entry, path = load(folder).tables[name], table_path(folder, name)
    reader.check_file(path, entry.file_digest)
    try:
        data = pq.read_table(BytesIO(path.read_bytes()))
        same = digests.table_digest(table, data) == entry.digest and data.num_rows == entry.rows
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error
    if not same:
        raise UserError(f"{path}: does not match the manifest; the file was changed or damaged")
    return reader.to_frame(table.columns, [data])


def read_environment(folder: Path) -> dict[str, Any]:
    """environment.json, checked against the manifest; UserError where it is missing or damaged."""
    tree: dict[str, Any] = json.loads(read_checked(folder, ENVIRONMENT_NAME, load(folder).files[ENVIRONMENT_NAME]))
    return tree


def span(folder: Path) -> tuple[float, float]:
    """When the training began and ended, in seconds since 1970; of an earlier version the times of its files."""
    environment, written = read_environment(folder), (folder / manifest.FILE_NAME).stat().st_mtime
    began, ended = (environment.get(name) for name in (STARTED, ENDED))
    return (written, written) if began is None or ended is None else (from_text(began), from_text(ended))


@dataclass(frozen=True)
class Verified:
    """What a DPO folder holds, all of it undamaged."""

    fingerprint: str
    tables: int
    model_folders: int

    def lines(self) -> list[str]:
        """In words."""
        return [
            f"whole: a DPO training, {self.tables} tables, {self.model_folders} model folder, fingerprint "
            f"{self.fingerprint}"
        ]


def verify(folder: Path) -> Verified:
    """Compare every file of a DPO folder with its digest; UserError names the first that is damaged or does not belong.

    Nothing is computed again.
    """
    recorded = load(folder)
    check_links(folder)
    for name, digest in recorded.files.items():
        read_checked(folder, name, digest)
    for table in recorded.tables:
        read_table(folder, table)
    final = final_folder(folder)
    listed = {manifest.FILE_NAME, REPORT_NAME, *recorded.files}  # a report is no part of the training
    listed |= {table_path(folder, table).relative_to(folder).as_posix() for table in recorded.tables}
    listed |= {(final / name).relative_to(folder).as_posix() for name in check_sums(final)}
    for path in sorted(folder.rglob("*")):
        if not path.is_dir() and path.relative_to(folder).as_posix() not in listed:
            raise UserError(f"{path}: is no file of this DPO training: the manifest does not list it; move it away")
    return Verified(recorded.fingerprint, len(recorded.tables), 1)
