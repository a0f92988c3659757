"""Whether every recorded file of a run folder is what was written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ppo_repro.errors import UserError
from ppo_repro.records import iteration_log, manifest, reader, side_reader
from ppo_repro.records.contents import check_contents, final_folder
from ppo_repro.runs import checkpoints


@dataclass(frozen=True)
class Verified:
    """What a run folder holds, all of it undamaged. Paths below the run folder."""

    status: str
    fingerprint: str
    iterations: int
    tables: int  # Parquet files
    checkpoints: int
    model_folders: int
    manifest_version: int
    unfinished: tuple[str, ...]  # what a process that was ended had begun to write; `resume` removes it
    unfinished_line: int  # bytes at the end of iterations.jsonl, for the same reason
    uncovered: tuple[str, ...]  # under no digest: no part of the run, or of an earlier version

    def lines(self) -> list[str]:
        """In words, one sentence per line."""
        found = [
            f"whole: {self.status}, {self.iterations} iterations in {self.tables} tables, "
            f"{self.checkpoints} checkpoints, {self.model_folders} model folders, fingerprint {self.fingerprint}"
        ]
        if self.manifest_version < manifest.VERSION:
            found.append(
                f"manifest version {self.manifest_version}: the values of tables, the configuration, the notes and "
                "the models were compared; the manifest itself and other bytes of the files have no digest"
            )
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
    tables = manifest.tables_of(recorded)
    for entry in recorded.iterations:
        for table in tables:
            reader.read_recorded(run_dir, recorded, table, entry.iteration, verify=True)
    side_files = list(manifest.side_files(recorded))
    for file in side_files:
        side_reader.read_side_file(run_dir, file, verify=True)
    whole = checkpoints.check_all(run_dir, recorded)
    if recorded.status == "complete" and manifest.has_responses(recorded):
        final = final_folder(run_dir)
        if not final.is_dir():
            raise UserError(f"{final}: is missing; restore it")
    return Verified(
        recorded.status,
        recorded.fingerprint,
        len(recorded.iterations),
        len(tables) * len(recorded.iterations) + len(side_files),
        whole,
        contents.models,
        recorded.manifest_version,
        contents.unfinished,
        contents.unfinished_line,
        contents.uncovered,
    )
