"""Recorded runs and grids as TensorBoard event files, written while they work or later."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from ppo_repro.base.errors import UserError
from ppo_repro.config.files import read_tree
from ppo_repro.grids.cell import CELLS
from ppo_repro.records import manifest
from ppo_repro.records.folder import CONFIG_NAME, check_config, end_time, start_time
from ppo_repro.tracking.following import POLL_SECONDS
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


def copy(folder: Path, events: Path, is_over: Callable[[float], bool]) -> bool:
    """Write EVENTS/<experiment>/<run> until the run is over, or EVENTS/<grid>/<cell> of each cell after the grid.

    The files replace our earlier files. `is_over` as in `follower.copy`. Returns False if nothing was recorded. Raises
    UserError if records are damaged or the folder cannot be written.
    """
    over = False
    while not (folder / manifest.FILE_NAME).exists():
        if over:
            return (folder / CELLS).exists() and _copy_grid(folder, events)
        over = is_over(POLL_SECONDS)
    experiment = str(read_tree(folder / CONFIG_NAME)["experiment"])
    _copy_run(folder, events / experiment / folder.name, (lambda seconds: True) if over else is_over)
    return True


def _copy_grid(grid_dir: Path, events: Path) -> bool:
    for row in pd.read_parquet(grid_dir / CELLS).to_dict("records"):
        if row["run_dir"]:
            _copy_run(grid_dir / str(row["run_dir"]), events / grid_dir.name / str(row["cell"]), lambda seconds: True)
    return True


def _copy_run(run_dir: Path, events: Path, is_over: Callable[[float], bool]) -> None:
    """Write the event file of one run into the folder `events`."""
    recorded, numbers = manifest.load_head(run_dir), RunNumbers(run_dir)
    check_config(run_dir, recorded)
    began = start_time(run_dir, recorded)
    with closing(_writer(events)) as writer:
        text = (run_dir / CONFIG_NAME).read_text(encoding="utf-8")
        writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()), walltime=began)
        over = False
        while not over:
            over = is_over(POLL_SECONDS)  # asked before reading: the last iterations are read too
            _add(writer, numbers.new())
        ended = end_time(run_dir, manifest.load_head(run_dir))
        _add(writer, numbers.ending())
        writer.add_text("verdicts", "\n".join(f"* {said}" for said in sentences(run_dir)), walltime=ended)


def _writer(events: Path) -> SummaryWriter:
    """Return a new event file that replaces our earlier ones. Raises UserError if it cannot be made."""
    from tensorboardX import SummaryWriter

    try:
        for earlier in events.glob(f"events.out.tfevents.*{SUFFIX}"):
            earlier.unlink()
        return SummaryWriter(str(events), filename_suffix=SUFFIX, flush_secs=2)
    except OSError as error:
        raise UserError(
            f"--tensorboard {events}: cannot be written ({error.strerror}); choose another folder"
        ) from error


def _add(writer: SummaryWriter, found: Sequence[Scalar]) -> None:
    for scalar in found:
        writer.add_scalar(scalar.name, scalar.value, scalar.step, walltime=scalar.moment)
    writer.flush()
