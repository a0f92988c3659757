"""Whether every file of a run folder is what was written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePath

from ppo_repro.errors import UserError
from ppo_repro.files import LOCK_NAME, SUMS_NAME, check_links, check_sums
from ppo_repro.records import accuracy, iteration_log, manifest, reader, times
from ppo_repro.records.config_file import RESUMED
from ppo_repro.records.contents import CHECKPOINT, CHECKPOINTS_NAME, REPORT_NAME, SERVERS_NAME
from ppo_repro.records.manifest import Head, Manifest


@dataclass(frozen=True)
class Contents:
    """The files of a run folder that are not of the run. Paths below it."""

    unfinished: tuple[str, ...]  # what a process that was ended had begun to write; `resume` removes it
    unfinished_line: int  # bytes behind the end of the log, for the same reason
    uncovered: tuple[str, ...]  # under no digest: no part of the run


@dataclass(frozen=True)
class Verified:
    """What a run folder holds, all of it undamaged."""

    status: str
    fingerprint: str
    iterations: int
    tables: int  # Parquet files
    checkpoints: int
    model_folders: int
    unfinished: tuple[str, ...]
    unfinished_line: int
    uncovered: tuple[str, ...]

    def lines(self) -> list[str]:
        """In words, one sentence per line."""
        found = [
            f"whole: {self.status}, {self.iterations} iterations in {self.tables} tables, "
            f"{self.checkpoints} checkpoints, {self.model_folders} model folders, fingerprint {self.fingerprint}"
        ]
        begun = list(self.unfinished)
        if self.unfinished_line:
            begun.append(f"the last {self.unfinished_line} bytes of {iteration_log.FILE_NAME}")
        if begun:
            found.append(f"begun by a process that was ended, and no part of the run: {', '.join(begun)}")
        if self.uncovered:
            found.append(f"under no digest: {', '.join(self.uncovered)}")
        return found


def verify(run_dir: Path) -> Verified:
    """Compare every recorded file of a run folder with its digest; UserError names the first damaged one.

    Nothing is computed again; `rerun` does that.
    """
    recorded = manifest.load(run_dir)
    contents = check_contents(run_dir, recorded)
    return Verified(
        recorded.status,
        recorded.fingerprint,
        recorded.num_iterations,
        sum(1 for _ in manifest.recorded_tables(recorded)),
        sum(CHECKPOINT.fullmatch(name) is not None for name in recorded.files),
        sum(PurePath(name).name == SUMS_NAME for name in recorded.files),
        contents.unfinished,
        contents.unfinished_line,
        contents.uncovered,
    )


def check_contents(run_dir: Path, recorded: Manifest) -> Contents:
    """Compare every file with its digest; UserError names the first one that is damaged, missing or not of the run."""
    check_links(run_dir)
    digests = {**recorded.notes, **recorded.files}
    for file in manifest.recorded_tables(recorded):
        digests[file.path(Path()).as_posix()] = file.entry.file_digest
    for listed_name, digest in digests.items():
        reader.check_file(run_dir / listed_name, digest)
    listed = {manifest.FILE_NAME, iteration_log.FILE_NAME, LOCK_NAME, *digests}
    for sums in [PurePath(name) for name in digests if PurePath(name).name == SUMS_NAME]:
        listed |= {(sums.parent / name).as_posix() for name in check_sums(run_dir / sums.parent)}
    lock = run_dir / LOCK_NAME
    if lock.exists() and (not lock.is_file() or lock.stat().st_size):
        raise UserError(f"{lock}: is not an empty file, as the lock of a run is; remove it or empty it")
    unfinished, uncovered = [], []
    for path in sorted(run_dir.rglob("*")):
        name = path.relative_to(run_dir)
        if path.is_dir() or name.as_posix() in listed:
            continue
        if name.parts[0] in (REPORT_NAME, SERVERS_NAME):
            uncovered.append(name.as_posix())
        elif recorded.status != "complete" and _may_be_unfinished(name):
            unfinished.append(name.as_posix())
        else:
            raise UserError(f"{path}: is no file of this run: the manifest does not list it; move it away")
    log = run_dir / iteration_log.FILE_NAME
    behind = log.stat().st_size - recorded.log_bytes
    if behind and recorded.status == "complete":
        raise UserError(f"{log}: is longer than the {recorded.log_bytes} bytes of the manifest; cut it off there")
    return Contents(tuple(unfinished), behind, tuple(uncovered))


def _may_be_unfinished(name: Path) -> bool:
    """Whether a process writes such a file before the manifest lists it."""
    is_note = name.match(RESUMED) or name.name in (accuracy.FILE_NAME, times.FILE_NAME)
    return name.parts[0] in ("records", CHECKPOINTS_NAME) or name.suffix == ".tmp" or (len(name.parts) == 1 and is_note)


def remove_unfinished(run_dir: Path, recorded: Head, contents: Contents) -> None:
    """Remove what ended processes had begun to write: a complete run lists all it has. UserError where that fails."""
    if contents.unfinished_line:
        iteration_log.cut(run_dir, recorded.log_bytes)
    try:
        for name in contents.unfinished:
            (run_dir / name).unlink(missing_ok=True)  # a manifest.json.tmp has become manifest.json
        for folder in sorted((run_dir / CHECKPOINTS_NAME).glob("*/"), reverse=True):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
    except OSError as error:
        raise UserError(f"{run_dir}: cannot be cleared ({error.strerror}); make the run folder writable") from error
