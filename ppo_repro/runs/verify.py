"""Whether every file of a run folder is what was written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ppo_repro.disk.folder import SUMS_NAME, check_links, check_sums
from ppo_repro.errors import UserError
from ppo_repro.records import manifest, reader, side_reader
from ppo_repro.records.config_file import check_config, check_notes
from ppo_repro.runs import checkpoints


@dataclass(frozen=True)
class Verified:
    """What a run folder holds, all of it undamaged."""

    status: str
    fingerprint: str
    iterations: int
    tables: int  # Parquet files
    checkpoints: int
    model_folders: int


def verify(run_dir: Path) -> Verified:
    """Compare every file of a run folder with its recorded digests; UserError names the first damaged one.

    Nothing is computed again; `rerun` does that.
    """
    recorded = manifest.load(run_dir)
    check_links(run_dir)
    check_config(run_dir, recorded)
    check_notes(run_dir, recorded)
    tables = manifest.tables_of(recorded)
    for entry in recorded.iterations:
        for table in tables:
            reader.read_recorded(run_dir, recorded, table, entry.iteration, verify=True)
    side_files = list(manifest.side_files(recorded))
    for file in side_files:
        side_reader.read_side_file(run_dir, file, verify=True)
    folder = checkpoints.checkpoints_folder(run_dir)
    models = sorted(path for path in folder.iterdir() if _is_model(path)) if folder.is_dir() else []
    for model in models:
        if not (model / SUMS_NAME).is_file():
            raise UserError(f"{model / SUMS_NAME}: is missing; restore it")
        check_sums(model)
    whole = checkpoints.check_all(run_dir, recorded)
    if (
        recorded.status == "complete"
        and manifest.has_responses(recorded)
        and not checkpoints.final_folder(run_dir).is_dir()
    ):
        raise UserError(f"{checkpoints.final_folder(run_dir)}: is missing; restore it")
    return Verified(
        recorded.status,
        recorded.fingerprint,
        len(recorded.iterations),
        len(tables) * len(recorded.iterations) + len(side_files),
        whole,
        len(models),
    )


def _is_model(path: Path) -> bool:
    is_checkpoint = path.name.startswith("iteration-") or path.name == checkpoints.FINAL_STATE
    return path.is_dir() and not path.suffix and not is_checkpoint
