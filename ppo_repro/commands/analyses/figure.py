"""Implement `ppo-repro analyse figure`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from ppo_repro.analysis import figures
from ppo_repro.analysis.grid_outcomes import ACCURACY, MEASURES, outcomes
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import atomic_write, require_ours
from ppo_repro.base.latest import run_named
from ppo_repro.base.output import print_json

KINDS = ("agreement", "mismatch", "settings", "differences")


def add_options(option: Callable[..., argparse.Action]) -> None:
    """Add the options of the command."""
    option("kind", choices=KINDS, help="what is drawn")
    about = "the SVG file to write; replaces only a file that ppo-repro wrote"
    option("out", metavar="FILE.svg", type=Path, help=about)
    option("folders", metavar="RUN_OR_GRID", type=run_named, nargs="+", help="runs, or one grid")
    option("--measure", choices=MEASURES, default=ACCURACY, help="which measure of a grid is drawn")


def command(arguments: argparse.Namespace) -> None:
    """Write one figure."""
    require_ours(arguments.out)
    axes = _drawn(arguments.kind, arguments.folders, arguments.measure)
    atomic_write(arguments.out, figures.svg(axes).encode())
    if arguments.json:
        print_json({"figure": str(arguments.out)})


def _drawn(kind: str, folders: Sequence[Path], measure: str) -> Axes:
    """Draw runs, or the one grid of a kind for grids, and return the axes."""
    if kind == "agreement":
        return figures.agreement_figure(folders)
    if kind == "mismatch":
        return figures.mismatch_figure(folders)
    if len(folders) > 1:
        raise UserError(f"{kind}: {len(folders)} folders; give one grid")
    cells = outcomes(folders[0])
    if kind == "settings":
        return figures.settings_figure(cells, measure)
    return figures.differences_figure(cells, measure)
