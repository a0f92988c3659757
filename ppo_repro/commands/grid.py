"""The command on grids. Heavy imports wait until a command runs: --help stays quick."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import print_result, say

if TYPE_CHECKING:
    from ppo_repro.grids.executor import Executor


def grid_command(arguments: argparse.Namespace) -> int:
    """Run every cell of a grid file that is not complete; exit 1 if one is not complete at the end."""
    say(f"{arguments.grid}: running what is missing of it in {arguments.out}")
    from ppo_repro.base.lock import require_no_writer
    from ppo_repro.config.control import ControlConfig
    from ppo_repro.grids.spec import load_grid
    from ppo_repro.tracking.follower import Copies, followed, targets_of

    grid = load_grid(arguments.grid)
    if arguments.processes > 1 and any(isinstance(cell.config, ControlConfig) for cell in grid.cells):
        raise UserError(f"--processes {arguments.processes}: a control run works in one process; leave the option out")
    folder = arguments.out / grid.name
    targets = targets_of(arguments.track, arguments.tensorboard)
    require_no_writer(folder)
    from ppo_repro.grids.grid import lines, run_grid  # torch takes seconds: mistakes come before

    executor, copies = _executor(arguments, folder), Copies()
    copying = followed(folder, copies, targets)
    outcome = run_grid(grid, arguments.out, executor, arguments.keep_changed, copying, arguments.processes)
    is_complete = outcome.table["state"] == "complete"
    fields = {
        "grid": grid.name,
        "folder": str(folder),
        "complete": int(is_complete.sum()),
        "ran": list(outcome.ran),
        "cells": outcome.table[["cell", "state", "fingerprint", "message", "run_dir"]].to_dict("records"),
    }
    print_result(arguments.json, fields | copies.fields, [*lines(grid, folder, outcome), *copies.lines])
    return 0 if is_complete.all() else 1


def _executor(arguments: argparse.Namespace, folder: Path) -> Executor:
    from ppo_repro.config.yaml_text import parse_yaml
    from ppo_repro.grids.executor import Processes
    from ppo_repro.grids.ray_and_slurm import Ray, Slurm

    if arguments.ray is not None and arguments.slurm is not None:
        raise UserError("--ray and --slurm: choose one")
    if arguments.ray is not None:
        return Ray(arguments.ray, arguments.workers)
    if arguments.slurm is None:
        return Processes(arguments.workers)
    parameters: dict[str, Any] = {}
    for setting in arguments.slurm:
        name, equals, value = setting.partition("=")
        if not equals:
            raise UserError(f"--slurm {setting}: must be NAME=VALUE, for example --slurm slurm_partition=cpu")
        try:
            parameters[name] = parse_yaml(value)  # submitit checks types: a time is a number
        except UserError as error:
            raise UserError(f"--slurm {setting}: {error}") from error
    return Slurm(folder / "slurm", arguments.workers, parameters)
