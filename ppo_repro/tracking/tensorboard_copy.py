"""Write recorded runs and grids as TensorBoard event files, during the run or later."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_repro.base.errors import UserError
from ppo_repro.config.files import read_tree
from ppo_repro.records import manifest
from ppo_repro.records.folder import CONFIG_NAME, check_config, end_time, start_time
from ppo_repro.records.grid import CELLS
from ppo_repro.tracking.following import IsOver, begun, follow_cells, follow_run
from ppo_repro.tracking.numbers import RunNumbers, Scalar, sentences

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

SUFFIX = ".ppo_repro"  # of our event files; other files in the same folder stay


def lines(events: Path) -> list[str]:
    """Return the printed lines: the command that shows the event files."""
    return [
        f"TensorBoard tensorboard --logdir {shlex.quote(str(events))}",
        "its viewer  pip install tensorboard",
    ]


def copy(folder: Path, events: Path, is_over: IsOver) -> bool:
    """Write EVENTS/<experiment>/<run>, or EVENTS/<grid>/<cell> of each cell, until the run or grid is over.

    New files replace earlier copies. Returns False if nothing was recorded. Raises UserError if records are damaged or
    the folder cannot be written.
    """
    still = begun(folder, is_over)
    if still is None:
        return False
    if (folder / CELLS).exists():
        follow_cells(folder, still, lambda run_dir, row: _RunCopy(run_dir, events / folder.name / str(row["cell"])))
    else:
        experiment = str(read_tree(folder / CONFIG_NAME)["experiment"])
        follow_run(_RunCopy(folder, events / experiment / folder.name), still)
    return True


class _RunCopy:
    """Copy of one run as an event file in the folder `events`."""

    def __init__(self, run_dir: Path, events: Path) -> None:
        recorded = manifest.load_head(run_dir)
        check_config(run_dir, recorded)
        self.ended, self._run_dir, self._numbers, self._writer = False, run_dir, RunNumbers(run_dir), _writer(events)
        text = (run_dir / CONFIG_NAME).read_text(encoding="utf-8")
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        self._writer.add_text("config", indented, walltime=start_time(run_dir, recorded))

    def catch_up(self, is_over: bool) -> None:
        if self.ended:
            return
        recorded = manifest.load_head(self._run_dir)
        self._add(self._numbers.new())
        self.ended = is_over or recorded.status == "complete"
        if self.ended:
            self._add(self._numbers.ending())
            verdicts = "\n".join(f"* {sentence}" for sentence in sentences(self._run_dir))
            self._writer.add_text("verdicts", verdicts, walltime=end_time(self._run_dir, recorded))
            self._writer.close()

    def _add(self, found: Sequence[Scalar]) -> None:
        for scalar in found:
            self._writer.add_scalar(scalar.name, scalar.value, scalar.step, walltime=scalar.moment)
        self._writer.flush()


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
