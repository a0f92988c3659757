"""Write recorded runs and grids as TensorBoard event files, during the run or later."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_repro.base.errors import UserError
from ppo_repro.config.files import read_tree
from ppo_repro.records import manifest
from ppo_repro.records.folder import CONFIG_NAME, checked_config_path
from ppo_repro.records.manifest import Head
from ppo_repro.records.notes import end_time, start_time
from ppo_repro.tracking.following import IsOver, follow
from ppo_repro.tracking.scalars import Scalar, sentences

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

SUFFIX = ".ppo_repro"  # of our event files; other files in the same folder stay


def copy(folder: Path, events: str, is_over: IsOver) -> tuple[list[str], str] | None:
    """Write EVENTS/<experiment>/<run>, or EVENTS/<grid>/<cell> of each cell, until the run or grid is over.

    New files replace earlier copies. Returns the printed lines and the folder, None if nothing was recorded. Raises
    UserError if records are damaged or the folder cannot be written.
    """

    def begin(run_dir: Path, row: dict[str, Any]) -> _RunCopy:
        of_cell = (folder.name, str(row["cell"])) if row else None
        group, name = of_cell or (str(read_tree(folder / CONFIG_NAME)["experiment"]), folder.name)
        return _RunCopy(run_dir, Path(events, group, name))

    if not follow(folder, is_over, begin):
        return None
    shown = f"TensorBoard tensorboard --logdir {shlex.quote(events)}"
    return [shown, "its viewer  pip install tensorboard"], events


class _RunCopy:
    """Copy of one run as an event file in the folder `events`."""

    def __init__(self, run_dir: Path, events: Path) -> None:
        recorded = manifest.load_head(run_dir)
        checked_config_path(run_dir, recorded)
        self._run_dir, self._writer = run_dir, _writer(events)
        text = (run_dir / CONFIG_NAME).read_text(encoding="utf-8")
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        self._writer.add_text("config", indented, walltime=start_time(run_dir, recorded))

    def log(self, scalars: Sequence[Scalar]) -> None:
        for scalar in scalars:
            self._writer.add_scalar(scalar.name, scalar.value, scalar.step, walltime=scalar.moment)
        self._writer.flush()

    def end(self, head: Head, last: Sequence[Scalar]) -> None:
        self.log(last)
        self._writer.add_text("verdicts", sentences(self._run_dir, head), walltime=end_time(self._run_dir, head))
        self._writer.close()

    def give_up(self) -> None:
        self._writer.close()


def _writer(events: Path) -> SummaryWriter:
    """Create an event file that replaces earlier copies. Raises UserError if the file cannot be created."""
    from tensorboardX import SummaryWriter

    try:
        for earlier in events.glob(f"events.out.tfevents.*{SUFFIX}"):
            earlier.unlink()
        return SummaryWriter(str(events), filename_suffix=SUFFIX, flush_secs=2)
    except OSError as error:
        raise UserError(
            f"--tensorboard {events}: cannot be written ({error.strerror}); choose another folder"
        ) from error
