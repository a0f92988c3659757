"""Copies of finished runs and grids elsewhere, for `track` and `grid --track`. MLflow takes seconds to import."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ppo_repro.errors import UserError
from ppo_repro.output import masked, say

Said = tuple[list[str], dict[str, Any]]  # lines for people, fields for JSON


def into_mlflow(folder: Path, uri: str, is_grid: bool) -> Said:
    """Copy a run or a grid with a page about it; where to look. UserError where it is damaged or the store is gone."""
    _require_recorded(folder, is_grid)
    from ppo_repro.tracking import links
    from ppo_repro.tracking.mlflow_copy import add_report, track, track_grid

    place = track_grid(folder, uri) if is_grid else track(folder, uri)
    try:
        add_report(folder, uri, place)
    except UserError as error:  # such as a run without iterations, which is copied all the same
        say(f"the report page is not in the copy: {error}")
    return links.lines(uri, place), links.fields(uri, place)


def into_tensorboard(folder: Path, events: Path, is_grid: bool) -> Said:
    """Write event files of a run, or of every run of a grid that began; how to look at them. UserError likewise."""
    require_copies(events)
    _require_recorded(folder, is_grid)
    from ppo_repro.tracking import tensorboard_copy

    if is_grid:
        tensorboard_copy.write_grid(folder, events)
    else:
        tensorboard_copy.write(folder, events)
    return tensorboard_copy.lines(events), {"tensorboard": str(events)}


def require_copies(tensorboard: Path | None) -> None:
    """UserError where event files are asked for and cannot be written, before a run begins."""
    if tensorboard is not None and find_spec("tensorboardX") is None:
        raise UserError(
            "--tensorboard: needs the package tensorboardX; install it with `pip install 'ppo_repro[tensorboard]'`"
        )


def grid_into_mlflow(folder: Path, uri: str) -> Said:
    """`into_mlflow` of a grid that was run just now: a failure is said, not raised."""
    try:
        return into_mlflow(folder, uri, is_grid=True)
    except UserError as error:  # the grid is done, and its results do not depend on a server
        say(f"tracking failed: {error}; copy it later with `ppo-repro track {folder} --uri {masked(uri)}`")
        return [], {}


def grid_into_tensorboard(folder: Path, events: Path) -> Said:
    """`into_tensorboard` of a grid that was run just now: a failure is said, not raised."""
    try:
        return into_tensorboard(folder, events, is_grid=True)
    except UserError as error:
        say(f"{error}; copy it later with `ppo-repro track {folder} --tensorboard DIR`")
        return [], {}


def _require_recorded(folder: Path, is_grid: bool) -> None:
    """UserError unless there is something to copy, before MLflow is imported."""
    from ppo_repro.records.reader import open_manifest

    if not is_grid:
        open_manifest(folder, allow_incomplete=True)
