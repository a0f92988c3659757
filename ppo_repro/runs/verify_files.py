"""Check that every file of a run folder has the recorded bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePath

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import MANIFEST, SUMS_NAME, check_links, check_sums
from ppo_repro.config.kinds import LANGUAGE
from ppo_repro.records import manifest, reader
from ppo_repro.records.folder import (
    ACCURACY_NAME,
    CARD_NAME,
    CHECKPOINT,
    ENGINE_NAME,
    MODEL_FOLDER,
    REPORT_NAME,
    SERVERS_NAME,
    TIMES_NAME,
    load_recorded_config,
)
from ppo_repro.records.label import LABEL_NAME
from ppo_repro.records.manifest import Manifest
from ppo_repro.records.run_state import RunState
from ppo_repro.runs.summary import not_promised

# names of files that a process may write before the manifest lists them; any other unlisted file is foreign
_UNFINISHED = re.compile(
    r"(manifest\.json|iterations\.jsonl)\.tmp"
    rf"|({'|'.join(map(re.escape, (ACCURACY_NAME, CARD_NAME, TIMES_NAME)))}|resumed-\d{{3,}}\.json)(\.tmp)?"
    r"|records/\w+/(preparation|iteration=\d{6,})\.parquet(\.tmp)?"
    r"|checkpoints/(iteration-\d{6,}|final_state)\.safetensors(\.tmp)?"
    rf"|{MODEL_FOLDER.pattern}/.+"
)


@dataclass(frozen=True)
class Verified:
    """The contents of an undamaged run folder. Paths are relative to it."""

    status: RunState
    fingerprint: str
    iterations: int
    tables: int  # Parquet files
    checkpoints: int
    model_folders: int
    unfinished: tuple[str, ...]  # files that an ended process had begun to write; `resume` removes them
    unfinished_line: int  # bytes after the end of the log, from an ended process too
    uncovered: tuple[str, ...]  # files without a digest, which are no part of the run
    not_promised: tuple[str, ...] = ()  # of a run whose engine promises no bits

    def lines(self) -> list[str]:
        """Describe the contents, one sentence per line."""
        lines = [
            f"whole: {self.status}, {self.iterations} iterations in {self.tables} table files, "
            f"{self.checkpoints} checkpoints, {self.model_folders} model folders, fingerprint {self.fingerprint}"
        ]
        begun = list(self.unfinished)
        if self.unfinished_line:
            begun.append(f"the last {self.unfinished_line} bytes of {manifest.LOG_NAME}")
        if begun:
            lines.append(f"begun by a process that was ended, and no part of the run: {', '.join(begun)}")
        if self.uncovered:
            lines.append(f"under no digest: {', '.join(self.uncovered)}")
        return [*lines, *self.not_promised]


def verify_files(run_dir: Path, recorded: Manifest | None = None) -> Verified:
    """Compare every file with its digest. Raises UserError for the first damaged, missing or foreign file.

    `recorded`: the manifest; None reads it from the folder.
    """
    recorded = recorded or manifest.load(run_dir)
    check_links(run_dir)
    tables = {file.path(Path()).as_posix(): file.entry.file_digest for file in manifest.recorded_tables(recorded)}
    digests = {**recorded.notes, **recorded.files, **tables}
    for listed_name, digest in digests.items():
        reader.check_file(run_dir / listed_name, digest)
    listed = {MANIFEST, manifest.LOG_NAME, *digests}
    models = [PurePath(name).parent for name in digests if PurePath(name).name == SUMS_NAME]
    for folder in models:
        listed |= {(folder / name).as_posix() for name in check_sums(run_dir / folder)}
    unfinished, uncovered = [], []
    for path in sorted(run_dir.rglob("*")):
        name = path.relative_to(run_dir).as_posix()
        if path.is_dir() or name in listed:
            continue
        if name.split("/")[0] in (ENGINE_NAME, SERVERS_NAME) or name.removesuffix(".tmp") in (LABEL_NAME, REPORT_NAME):
            uncovered.append(name)  # label, report and logs may change at any time
        elif recorded.status != "complete" and _UNFINISHED.fullmatch(name):
            unfinished.append(name)
        else:
            raise UserError(f"{path}: is no file of this run: the manifest does not list it; move it away")
    log = run_dir / manifest.LOG_NAME
    behind = log.stat().st_size - recorded.log_bytes
    if behind and recorded.status == "complete":
        raise UserError(f"{log}: is longer than the {recorded.log_bytes} bytes of the manifest; cut it off there")
    return Verified(
        status=recorded.status,
        fingerprint=recorded.fingerprint,
        iterations=recorded.num_iterations,
        tables=len(tables),
        checkpoints=sum(CHECKPOINT.fullmatch(name) is not None for name in recorded.files),
        model_folders=len(models),
        unfinished=tuple(unfinished),
        unfinished_line=behind,
        uncovered=tuple(uncovered),
        not_promised=tuple(not_promised(load_recorded_config(run_dir))) if recorded.kind == LANGUAGE else (),
    )
