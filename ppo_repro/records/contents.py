"""Every file of a run folder but its checkpoints, against the digests of the manifest, and what no digest covers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from ppo_repro.errors import UserError
from ppo_repro.files import LOCK_NAME, SUMS_NAME, check_links, check_sums, file_digest, remove_folder
from ppo_repro.records import accuracy, iteration_log, manifest, reader, times
from ppo_repro.records.config_file import (
    CONFIG_NAME,
    ENVIRONMENT_NAME,
    RESUMED,
    check_config,
    check_notes,
    read_checked,
)
from ppo_repro.records.manifest import Head, Manifest

CHECKPOINTS_NAME = "checkpoints"
CHECKPOINT = re.compile(r"iteration-(\d{6,})")  # the name of the folder of one
UNEQUAL_NAME = "unequal"  # what there is to look at of a run that ended because bits were
# folders that a run makes beside its checkpoints
MODELS = ("reference", "final", "value_model", "adapter", "value_adapter", "base", "reward_model", UNEQUAL_NAME)
FINAL_STATE = "final_state"  # in the form of a checkpoint, without the weights
REPORT_NAME = "report.html"
SERVERS_NAME = "sglang"  # logs of the servers, and the weights they loaded
_DERIVED = (REPORT_NAME, SERVERS_NAME)
_UNFINISHED = {".tmp", ".removed"}


def checkpoints_folder(run_dir: Path) -> Path:
    """The folder of the checkpoints, the reference and at the end the trained models."""
    return run_dir / CHECKPOINTS_NAME


def reference_folder(run_dir: Path) -> Path:
    """The reference model with its tokenizer: what policy and value model started as, too."""
    return checkpoints_folder(run_dir) / "reference"


def final_folder(run_dir: Path) -> Path:
    """The trained policy of a finished run."""
    return checkpoints_folder(run_dir) / "final"


def value_folder(run_dir: Path) -> Path:
    """The trained value model of a finished run, or its head on the policy's trunk."""
    return checkpoints_folder(run_dir) / "value_model"


def final_state_folder(run_dir: Path) -> Path:
    """What training goes on from besides the trained models: a checkpoint without their weights."""
    return checkpoints_folder(run_dir) / FINAL_STATE


def checkpoint_folder(run_dir: Path, iteration: int) -> Path:
    """The checkpoint after `iteration` iterations."""
    return checkpoints_folder(run_dir) / f"iteration-{iteration:06d}"


@dataclass(frozen=True)
class Contents:
    """What a run folder holds beside undamaged records. Paths below the run folder."""

    models: int  # folders with a list of digests that the manifest has the digest of
    unfinished: tuple[str, ...]  # what a process that was ended had begun to write; `resume` removes it
    unfinished_line: int  # bytes behind the end of the log, for the same reason
    uncovered: tuple[str, ...]  # no part of the run, or of an earlier version that noted no digest


def check_contents(run_dir: Path, recorded: Manifest) -> Contents:
    """Compare every file with its digest; UserError names the first one that is damaged, missing or not of the run.

    The folders of checkpoints have lists of their own, which `checkpoints.check_all` compares.
    """
    check_links(run_dir)
    check_config(run_dir, recorded)
    check_notes(run_dir, recorded)
    _check_lock(run_dir)
    listed = {manifest.FILE_NAME, iteration_log.FILE_NAME, LOCK_NAME, CONFIG_NAME, ENVIRONMENT_NAME, *recorded.notes}
    listed |= set(_check_tables(run_dir, recorded))
    models = _models(run_dir, recorded)
    for model in models:
        listed |= {(model / name).as_posix() for name in check_sums(run_dir / model)}
    unfinished, uncovered = [], []
    for name in _files(run_dir):
        if name in listed or _is_of_checkpoint(PurePath(name)):
            continue
        if PurePath(name).parts[0] in _DERIVED:
            uncovered.append(name)
        elif recorded.status != "complete" and _may_be_unfinished(Path(name), recorded):
            unfinished.append(name)
        elif manifest.is_covered(recorded):
            raise UserError(f"{run_dir / name}: is no file of this run: the manifest does not list it; move it away")
        else:
            uncovered.append(name)
    return Contents(len(models), tuple(unfinished), _bytes_behind(run_dir, recorded), tuple(uncovered))


def _check_tables(run_dir: Path, recorded: Manifest) -> Iterator[str]:
    """The name of every table, its bytes compared."""
    known: dict[Path, str | None] = {}  # files of several iterations are read once
    for entry in recorded.iterations:
        for table, listed in entry.tables.items():
            path = manifest.recorded_path(run_dir, table, entry)
            if path not in known or known[path] != listed.file_digest:
                reader.check_file(path, listed.file_digest)
            known[path] = listed.file_digest
            yield path.relative_to(run_dir).as_posix()
    for file in manifest.side_files(recorded):
        path = file.path(run_dir)
        reader.check_file(path, file.entry.file_digest)
        yield path.relative_to(run_dir).as_posix()


def _check_lock(run_dir: Path) -> None:
    """The lock holds nothing, and a run that was copied without it is whole."""
    path = run_dir / LOCK_NAME
    if path.exists() and (not path.is_file() or path.stat().st_size):
        raise UserError(f"{path}: is not an empty file, as the lock of a run is; remove it or empty it")


def _bytes_behind(run_dir: Path, recorded: Manifest) -> int:
    path = run_dir / iteration_log.FILE_NAME
    behind = path.stat().st_size - recorded.log_bytes if path.exists() else 0
    if behind and recorded.status == "complete" and manifest.is_covered(recorded):
        raise UserError(f"{path}: is longer than the {recorded.log_bytes} bytes of the manifest; cut it off there")
    return behind


def _models(run_dir: Path, recorded: Head) -> list[PurePath]:
    """The model folders of a run, the list of each compared; a run of an earlier version has those that are there."""
    if not manifest.is_covered(recorded):
        there = [PurePath(CHECKPOINTS_NAME, name) for name in MODELS]
        return [model for model in there if _require_sums(run_dir / model)]
    for name, digest in recorded.files.items():
        read_checked(run_dir, name, digest)
    return [PurePath(name).parent for name in recorded.files if PurePath(name).name == SUMS_NAME]


def _require_sums(model: Path) -> bool:
    if model.is_dir() and not (model / SUMS_NAME).is_file():
        raise UserError(f"{model / SUMS_NAME}: is missing; restore it")
    return model.is_dir()


def _files(run_dir: Path) -> list[str]:
    return sorted(path.relative_to(run_dir).as_posix() for path in run_dir.rglob("*") if not path.is_dir())


def _is_of_checkpoint(name: PurePath) -> bool:
    if len(name.parts) < 3 or name.parts[0] != CHECKPOINTS_NAME:
        return False
    return name.parts[1] == FINAL_STATE or CHECKPOINT.fullmatch(name.parts[1]) is not None


def _may_be_unfinished(name: Path, recorded: Head) -> bool:
    """Whether a process writes such a file before the manifest lists it."""
    if PurePath(*name.parts[:2], SUMS_NAME).as_posix() in recorded.files:
        return False  # in a folder that is finished
    if any(PurePath(part).suffix in _UNFINISHED for part in name.parts):
        return True
    if name.parts[0] == CHECKPOINTS_NAME:
        return len(name.parts) > 2 and name.parts[1] in MODELS
    tables = {table.name for table in manifest.tables_of(recorded)}
    following = {manifest.table_path(Path(), table, recorded.num_iterations) for table in tables}
    beside = [table.name for table in manifest.side_tables_of(recorded)]
    following |= {manifest.side_path(Path(), t, i) for t in beside for i in (None, recorded.num_iterations)}
    notes = name.match(RESUMED) or name.name in (accuracy.FILE_NAME, times.FILE_NAME)
    return name in following or (len(name.parts) == 1 and notes)


def sums_digest(run_dir: Path, folder: Path) -> dict[str, str]:
    """SHA-256 of the SHA256SUMS of a model folder by its path below the run folder, as the manifest lists it."""
    path = folder / SUMS_NAME
    return {path.relative_to(run_dir).as_posix(): file_digest(path)}


def files_to_resume_with(recorded: Head, begins_again: bool) -> Mapping[str, str]:
    """What the manifest lists but unequal bits that ended the run, and the models where it begins again."""
    dropped = PurePath(CHECKPOINTS_NAME) if begins_again else PurePath(CHECKPOINTS_NAME, UNEQUAL_NAME)
    return {name: digest for name, digest in recorded.files.items() if not PurePath(name).is_relative_to(dropped)}


def remove_unfinished(run_dir: Path, contents: Contents) -> None:
    """Remove what ended processes had begun to write: a complete run lists all it has. UserError where that fails."""
    if contents.unfinished_line:
        log = run_dir / iteration_log.FILE_NAME
        iteration_log.cut(run_dir, log.stat().st_size - contents.unfinished_line)
    names = [PurePath(name) for name in contents.unfinished]
    # folders of models and checkpoints are made, and removed, as a whole
    folders = {PurePath(*name.parts[:2]) for name in names if name.parts[0] == CHECKPOINTS_NAME}
    try:
        for folder in sorted(folders):
            remove_folder(run_dir / folder)
        for name in names:
            (run_dir / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{run_dir}: cannot be cleared ({error.strerror}); make the run folder writable") from error
