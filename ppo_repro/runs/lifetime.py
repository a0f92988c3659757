"""How a run begins and ends on disk, however and whenever its process ends."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ppo_repro.disk.folder import only_writer, remove_folder
from ppo_repro.errors import UserError
from ppo_repro.records import manifest, writer
from ppo_repro.records.manifest import Status
from ppo_repro.stages.agreement import UnequalBits


@contextmanager
def new_run(temporary: Path, run_dir: Path) -> Iterator[None]:
    """Give the folder that `writer.lay_out_run` made its name; this process is its only writer until the block ends.

    An exception that ends the block is noted in the manifest; a run without a complete iteration is removed, unless
    its bits were unequal, which is to be looked at.
    The exception may come at any instant, as Ctrl-C does: no folder is left that says "running". UserError as
    `writer.publish_run`.
    """
    with only_writer(temporary):  # the lock belongs to the file, whichever folder it is in later
        try:
            writer.publish_run(temporary, run_dir)
            yield
        except BaseException as error:
            if temporary.exists():  # it has not been renamed yet
                shutil.rmtree(temporary, ignore_errors=True)
            elif manifest.load_head(run_dir).num_iterations or isinstance(error, UnequalBits):
                mark_ended(run_dir, error)
            else:
                remove_folder(run_dir)
            raise


def mark_ended(run_dir: Path, error: BaseException) -> None:
    """Note in the manifest that `error` ended the run; what is recorded stays.

    Where the note cannot be written either, the manifest keeps saying "running", and `error` is what is reported.
    """
    ended: Status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    with suppress(UserError):
        # from the disk: the error may have come after the file was written and before our copy was updated
        current = manifest.load_head(run_dir)
        if current.status != "complete":
            writer.mark(run_dir, current, ended)
