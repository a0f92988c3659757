"""Recorded runs as TensorBoard event files, written from the records while a run works or later."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from ppo_repro.config.files import read_tree
from ppo_repro.errors import UserError
from ppo_repro.records import manifest, times
from ppo_repro.records.config_file import CONFIG_NAME, check_config
from ppo_repro.records.manifest import Head
from ppo_repro.tracking import findings, scalars
from ppo_repro.tracking.scalars import Scalar, Seen

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

SUFFIX = ".ppo_repro"  # of our event files; others in the same folder are left alone
POLL_SECONDS = 1.0


def lines(folder: Path) -> list[str]:
    """How to look at the event files."""
    return [f"TensorBoard tensorboard --logdir {shlex.quote(str(folder))}"]


def write(run_dir: Path, folder: Path) -> Path:
    """Write the event file of a recorded run into FOLDER/<experiment>/<run>; returns that folder.

    An earlier one is replaced. UserError where the records are damaged or the folder cannot be written.
    """
    events = follow(run_dir, folder, lambda seconds: True)
    if events is None:
        raise UserError(f"{run_dir}: holds no {manifest.FILE_NAME}; give the folder of a run")
    return events


def write_grid(grid_dir: Path, folder: Path) -> None:
    """The same for every run of a grid that began, into FOLDER/<grid>/<cell>."""
    for row in pd.read_parquet(grid_dir / "cells.parquet").to_dict("records"):
        if row["run_dir"]:
            run_dir = grid_dir / str(row["run_dir"])
            _require_unchanged(run_dir)
            _copy(run_dir, folder / grid_dir.name / str(row["cell"]), lambda seconds: True)


def follow(run_dir: Path, folder: Path, is_over: Callable[[float], bool]) -> Path | None:
    """Write the event file of a run while it works; None if it recorded nothing. `is_over` as in `mlflow_copy`."""
    over = False
    while not (run_dir / manifest.FILE_NAME).exists():
        if over:
            return None
        over = is_over(POLL_SECONDS)
    _require_unchanged(run_dir)
    events = folder / str(read_tree(run_dir / CONFIG_NAME)["experiment"]) / run_dir.name
    _copy(run_dir, events, (lambda seconds: True) if over else is_over)
    return events


def _require_unchanged(run_dir: Path) -> None:
    check_config(run_dir, manifest.load_head(run_dir))


def _copy(run_dir: Path, events: Path, is_over: Callable[[float], bool]) -> None:
    """One run, into this very folder."""
    recorded, over = manifest.load_head(run_dir), False
    with closing(_writer(events)) as writer:
        _text(writer, "config", run_dir, times.started(run_dir, recorded))
        seen = _add_new(writer, run_dir, recorded, Seen())
        while not over:
            over = is_over(POLL_SECONDS)
            recorded = manifest.load_head(run_dir)
            seen = _add_new(writer, run_dir, recorded, seen)
        ended = times.ended(run_dir, recorded)
        _add(writer, scalars.ending_scalars(run_dir, recorded, ended))
        said = "\n".join(f"* {sentence}" for sentence in findings.sentences(run_dir, recorded))
        writer.add_text("verdicts", f"{said}\n* fingerprint {recorded.fingerprint}", walltime=ended)


def _writer(events: Path) -> SummaryWriter:
    """A new event file in place of ours of before; UserError where it cannot be made."""
    from tensorboardX import SummaryWriter

    try:
        for earlier in events.glob(f"events.out.tfevents.*{SUFFIX}"):
            earlier.unlink()
        return SummaryWriter(str(events), filename_suffix=SUFFIX, flush_secs=2)
    except OSError as error:
        raise UserError(
            f"--tensorboard {events}: cannot be written ({error.strerror}); choose another folder"
        ) from error


def _add_new(writer: SummaryWriter, run_dir: Path, recorded: Head, seen: Seen) -> Seen:
    found, now_seen = scalars.new_scalars(run_dir, recorded, seen)
    _add(writer, found)
    return now_seen


def _add(writer: SummaryWriter, found: Sequence[Scalar]) -> None:
    for scalar in found:
        writer.add_scalar(scalar.name, scalar.value, scalar.step, walltime=scalar.moment)
    writer.flush()


def _text(writer: SummaryWriter, tag: str, run_dir: Path, moment: float) -> None:
    text = (run_dir / CONFIG_NAME).read_text(encoding="utf-8")
    writer.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), walltime=moment)
