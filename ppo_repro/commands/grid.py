"""Commands on grids and studies. Heavy imports wait until they run, so that --help is quick."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_repro.errors import UserError
from ppo_repro.output import print_result, say
from ppo_repro.tracking.copies import require_tensorboard

if TYPE_CHECKING:
    from ppo_repro.grids.engines import Engine


def grid_command(arguments: argparse.Namespace) -> int:
    """Run every cell of a grid file that is not complete; exit 1 if one is not complete at the end."""
    say(f"{arguments.grid}: running what is missing of it in {arguments.out}")
    from ppo_repro.grids import results
    from ppo_repro.grids.grid import run_grid
    from ppo_repro.grids.progress import ConsoleGrid
    from ppo_repro.grids.spec import load_grid
    from ppo_repro.tracking.follower import followed

    grid = load_grid(arguments.grid)
    folder = arguments.out / grid.name
    require_tensorboard(arguments.tensorboard)
    engine = _engine(arguments, folder)
    with followed(folder, arguments.track, arguments.tensorboard) as copies, ConsoleGrid() as watcher:
        outcome = run_grid(grid, arguments.out, engine, watcher, arguments.changed)
    about = (grid, folder, outcome.table, outcome.ran, outcome.strangers)
    print_result(arguments.json, results.fields(*about) | copies.fields, [*results.lines(*about), *copies.lines])
    return 0 if (outcome.table["state"] == "complete").all() else 1


def reproduce_command(arguments: argparse.Namespace) -> int:
    """Run some cells of a study again and compare them with its committed results; exit 1 at a difference."""
    say(f"{arguments.study}: running {arguments.cells} of its cells again")
    from ppo_repro.grids import study
    from ppo_repro.grids.progress import ConsoleGrid

    with ConsoleGrid() as watcher:
        found = study.reproduce(
            arguments.study, arguments.cells, arguments.seed, arguments.out, arguments.workers, watcher
        )
    verdict = found.difference or f"identical: {len(found.cells)} cells and the tables of {study.PAGE}"
    print_result(arguments.json, asdict(found), [*found.cells, f"records     {found.folder}", verdict])
    return 1 if found.difference else 0


def _engine(arguments: argparse.Namespace, folder: Path) -> Engine:
    from ppo_repro.config.yaml_text import parse_yaml
    from ppo_repro.grids.engines import Processes
    from ppo_repro.grids.ray_tasks import Ray
    from ppo_repro.grids.slurm import Slurm

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
