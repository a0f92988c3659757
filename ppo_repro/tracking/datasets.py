"""The tables of a run as data sets of MLflow: name, digest, columns, rows, and where the Parquet files lie."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from mlflow.entities import Dataset, DatasetInput, InputTag
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

from ppo_repro.records import manifest
from ppo_repro.records.iteration_log import TableEntry
from ppo_repro.records.manifest import Manifest
from ppo_repro.records.schema import Table

# a column's kind -> MLflow's name of it; lists are arrays of these
KINDS = {"int32": "integer", "int64": "long", "float32": "float", "float64": "double"}
KINDS |= {"bool": "boolean", "string": "string"}
DIGEST_CHARACTERS = 36  # MLflow's limit


def tables_of(run_dir: Path, recorded: Manifest) -> list[DatasetInput]:
    """Every table of a run that has rows, side tables too; nothing is read: the manifest has rows and digests."""
    found = []
    for table in manifest.tables_of(recorded):
        entries = [entry.tables[table.name] for entry in recorded.iterations]
        found.append((table, run_dir / "records" / table.name, entries, len(entries)))
    for table in manifest.side_tables_of(recorded):
        entries = [file.entry for file in manifest.side_files(recorded) if file.table.name == table.name]
        found.append((table, run_dir / "records" / table.name, entries, len(entries)))
    return [_data_set(table, path, entries, files) for table, path, entries, files in found if entries]


def _data_set(table: Table, path: Path, entries: Sequence[TableEntry], files: int) -> DatasetInput:
    profile = {"num_rows": sum(entry.rows for entry in entries), "num_files": files, "grain": table.grain}
    return DatasetInput(
        Dataset(
            name=table.name,
            digest=_digest(entry.digest for entry in entries),
            source_type="local",
            source=json.dumps({"uri": str(path.absolute())}),
            schema=json.dumps({"mlflow_colspec": [_column(c.name, c.kind, c.nullable) for c in table.columns]}),
            profile=json.dumps(profile),
        ),
        [InputTag(MLFLOW_DATASET_CONTEXT, "records")],
    )


def _digest(digests: Iterable[str]) -> str:
    """Of the values of all files: equal for runs with the same values."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:DIGEST_CHARACTERS]


def _column(name: str, kind: str, nullable: bool) -> dict[str, object]:
    described: dict[str, object] = {"name": name, "required": not nullable}
    if kind.startswith("list<"):
        items = KINDS[kind.removeprefix("list<").removesuffix(">")]
        return {**described, "type": "array", "items": {"type": items}}
    return {**described, "type": KINDS[kind]}
