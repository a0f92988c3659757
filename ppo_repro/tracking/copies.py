"""Copies of what is recorded already, for `track`. MLflow takes seconds to import."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ppo_repro.errors import UserError
from ppo_repro.output import say

Said = tuple[list[str], dict[str, Any]]  # lines for people, fields for JSON


def into_mlflow(folder: Path, uri: str) -> Said:
    """Copy a run or grid with the page about it; where to look. UserError on damage or a store gone."""
    _require_recorded(folder)
    from ppo_repro.tracking.mlflow_copy import add_report, copy

    place = copy(folder, uri)
    assert place is not None
    try:
        add_report(folder, uri, place)
    except UserError as error:  # such as a run without iterations, which is copied all the same
        say(f"the report page is not in the copy: {error}")
    return place.lines(uri), place.fields(uri)


def into_tensorboard(folder: Path, events: Path) -> Said:
    """Write event files of a run, or of every run of a grid that began; how to look at them. UserError likewise."""
    require_tensorboard(events)
    _require_recorded(folder)
    from ppo_repro.tracking.tensorboard_copy import copy, lines

    copy(folder, events)
    return lines(events), {"tensorboard": str(events)}


def require_tensorboard(events: Path | None) -> None:
    """UserError if event files are asked for and cannot be written, before a run begins."""
    if events is not None and find_spec("tensorboardX") is None:
        raise UserError(
            "--tensorboard: needs the package tensorboardX; install it with `pip install 'ppo_repro[tensorboard]'`"
        )


def _require_recorded(folder: Path) -> None:
    """UserError unless there is something to copy, before MLflow is imported."""
    from ppo_repro.records.reader import open_manifest  # NumPy, which `track` needs only now

    if not (folder / "cells.parquet").exists():
        from ppo_repro.records.reader import open_manifest

        open_manifest(folder, allow_incomplete=True)
