"""How a run begins and ends on disk, whatever ends its process and whenever."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ppo_repro.disk.folder import only_writer, remove_folder
from ppo_repro.errors import UserError
from ppo_repro.records import manifest, writer
from ppo_repro.records.manifest import Status


@contextmanager
def new_run(temporary: Path, run_dir: Path) -> Iterator[None]:
    """What `writer.lay_out_run` made appears as the run folder, with this process as its only writer.

    What ends the block is noted in the manifest; a run that has no iteration by then is removed. An exception may
    come at any instant, as Ctrl-C does: no folder stays that says "running". UserError as `writer.publish_run`.
    """
    with only_writer(temporary):  # the lock is of the file, whatever folder it is in later
        try:
            writer.publish_run(temporary, run_dir)
            yield
        except BaseException as error:
            if temporary.exists():  # not ours yet
                shutil.rmtree(temporary, ignore_errors=True)
            elif manifest.load_head(run_dir).num_iterations:
                mark_ended(run_dir, error)
            else:
                remove_folder(run_dir)
            raise


def mark_ended(run_dir: Path, error: BaseException) -> None:
    """Note in the manifest that `error` ended the run; what is recorded stays.

    Where the note cannot be written either, the manifest goes on saying "running": `error` is the one to report.
    """
    ended: Status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    with suppress(UserError):
        # as it is on disk: the error may have come between the file and our copy of it
        current = manifest.load_head(run_dir)
        if current.status != "complete":
            writer.mark(run_dir, current, ended)
