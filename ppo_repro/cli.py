"""The command line. Heavy imports wait until a command needs them, so that --help is quick."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ppo_repro import __version__
from ppo_repro.errors import PromiseBroken, Terminated, UserError
from ppo_repro.output import print_json, print_result

if TYPE_CHECKING:
    from ppo_repro.ranks import Ranks
    from ppo_repro.runs.diff import Difference
    from ppo_repro.runs.progress import Watcher
    from ppo_repro.runs.summary import Summary

Command = Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line as one line, like every other mistake."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; try {self.prog} --help")


def _environment_count(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"environment variable {name} = {text!r}: must be a count; torchrun sets it")
    return int(text)


def _processes() -> tuple[int, int]:
    """(rank, number of processes) as torchrun sets them; (0, 1) without it."""
    size = _environment_count("WORLD_SIZE", 1)
    return (_environment_count("RANK", 0), size) if size > 1 else (0, 1)


@contextmanager
def _working_together() -> Iterator[tuple[Ranks, Watcher]]:
    """The processes of this command; the first one shows progress, the others are silent."""
    from ppo_repro.ranks import joined
    from ppo_repro.runs.progress import ConsoleProgress, Silent

    with joined(*_processes()) as ranks:
        if not ranks.is_first:
            yield ranks, Silent()
            return
        with ConsoleProgress() as watcher:
            yield ranks, watcher


def run_command(arguments: argparse.Namespace) -> int:
    """Run PPO, record every buffer, print a summary."""
    from ppo_repro.config_yaml import load_config

    with _working_together() as (ranks, watcher):
        config = load_config(arguments.config, arguments.set)
        from ppo_repro.runs.run import run
        from ppo_repro.runs.summary import summarise

        run_dir, seconds = run(config, arguments.out, watcher, ranks)
    if ranks.is_first:
        _report_run(summarise(run_dir, seconds), run_dir, arguments.json)
    return 0


def resume_command(arguments: argparse.Namespace) -> int:
    """Continue a run that was killed, interrupted or failed; exit 1 if what it computes again differs."""
    from ppo_repro.records.manifest import load

    load(arguments.run)
    from ppo_repro.runs.progress import ConsoleProgress
    from ppo_repro.runs.resume import resume
    from ppo_repro.runs.summary import summarise

    with ConsoleProgress() as watcher:
        found = resume(arguments.run, watcher, arguments.set)
    again = found.recorded - found.start
    _say(f"resumed after iteration {found.start}; {again} recorded iterations came out identical")
    _report_run(summarise(arguments.run), arguments.run, arguments.json)
    return 0


def _report_run(summary: Summary, run_dir: Path, as_json: bool) -> None:
    from ppo_repro.config_yaml import load_config
    from ppo_repro.runs.summary import speeds, verdicts

    if as_json:
        print_json(dataclasses.asdict(summary))
        return
    anchor = load_config(run_dir / "config.yaml").ppo.ratio_anchor
    print("\n".join([*verdicts(summary, anchor), *speeds(summary)]))
    print(f"fingerprint {summary.fingerprint}")
    print(f"records     {run_dir}")
    print(f"policy      {run_dir / 'checkpoints' / 'final'}")
    print(f"again       ppo-repro rerun {run_dir}")


def rerun_command(arguments: argparse.Namespace) -> int:
    """Execute a recorded run again and compare every buffer; exit 1 at a difference."""
    from ppo_repro.records.reader import open_manifest

    with _working_together() as (ranks, watcher):
        open_manifest(arguments.run)
        from ppo_repro.runs.run import rerun

        report = rerun(arguments.run, watcher, arguments.set, ranks)
    if not ranks.is_first:
        return 0 if report.difference is None else 1
    identical = f"identical: {report.iterations} iterations, fingerprint {report.fingerprint}"
    return _report_difference(report.difference, arguments.json, identical)


def diff_command(arguments: argparse.Namespace) -> int:
    """Compare two recorded runs bit by bit; exit 1 at a difference."""
    from ppo_repro.runs.diff import first_difference

    return _report_difference(first_difference(arguments.a, arguments.b), arguments.json, "identical")


def _report_difference(difference: Difference | None, as_json: bool, identical: str) -> int:
    if as_json:
        found = None if difference is None else dataclasses.asdict(difference)
        print_json({"identical": difference is None, "first_difference": found})
    else:
        print(identical if difference is None else f"different: {difference.describe()}")
    return 0 if difference is None else 1


def show_command(arguments: argparse.Namespace) -> int:
    """Print what a recorded run did."""
    from ppo_repro.config_yaml import load_config
    from ppo_repro.records import reader
    from ppo_repro.runs.summary import iteration_lines, sample_lines, speeds, summarise, verdicts

    run_dir = arguments.run
    manifest = reader.open_manifest(run_dir, allow_incomplete=not arguments.json)
    if arguments.json:
        print_json(dataclasses.asdict(summarise(run_dir)))
        return 0
    print(f"{run_dir}: {manifest.status}, {len(manifest.iterations)} iterations, fingerprint {manifest.fingerprint}")
    if manifest.iterations:
        print(iteration_lines(run_dir, 12).to_string(index=False, float_format=lambda x: f"{x:.4g}"))
        print("\n".join(sample_lines(run_dir, len(manifest.iterations) - 1, arguments.samples)))
    if manifest.status == "complete":
        summary = summarise(run_dir)
        anchor = load_config(run_dir / "config.yaml").ppo.ratio_anchor
        print("\n".join([*verdicts(summary, anchor), *speeds(summary)]))
    return 0


def probe_command(arguments: argparse.Namespace) -> int:
    """Check every invariance on this machine, with a negative control; exit 1 if one fails."""
    from ppo_repro.config_yaml import load_config

    config = load_config(arguments.config, arguments.set)
    from ppo_repro.runs.probe import failures, probe, render

    rows = probe(config)
    failed = failures(rows)
    if arguments.json:
        print_json({"rows": [dataclasses.asdict(row) for row in rows], "failures": failed})
    else:
        print(render(rows))
        print("\n".join(failed) or "every promise holds, and the control finds the differences it must find")
    return 1 if failed else 0


def plan_command(arguments: argparse.Namespace) -> int:
    """Work out how much memory a configuration needs, without loading a weight."""
    from ppo_repro.config_yaml import load_config

    config = load_config(arguments.config, arguments.set)
    from ppo_repro.runs.plan_table import as_json, lines
    from ppo_repro.runs.shapes import plan_run

    plan = plan_run(config)
    print_result(arguments.json, as_json(plan), lines(plan))
    return 0


def track_command(arguments: argparse.Namespace) -> int:
    """Copy a recorded run into MLflow."""
    from ppo_repro.records.reader import open_manifest

    open_manifest(arguments.run)
    from ppo_repro.tracking import track

    run_id = track(arguments.run, arguments.uri)
    line = f"MLflow run {run_id} in {arguments.uri}; look with: mlflow ui --backend-store-uri {arguments.uri}"
    print_result(arguments.json, {"run_id": run_id, "uri": arguments.uri}, [line])
    return 0


def _add_set(parser: argparse.ArgumentParser, about: str) -> None:
    parser.add_argument("--set", metavar="FIELD=VALUE", action="append", default=[], help=about)


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

    def add(name: str, command: Command) -> argparse.ArgumentParser:
        about = command.__doc__
        added = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        added.set_defaults(command=command)
        added.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
        return added

    for name, command in (("run", run_command), ("probe", probe_command), ("plan", plan_command)):
        configured = add(name, command)
        configured.add_argument("config", metavar="CONFIG", type=Path, help="YAML configuration of a run")
        _add_set(configured, "override one field; may be repeated")
        if name == "run":
            configured.add_argument("--out", metavar="DIR", type=Path, default=Path("runs"), help="where runs go")
    on_runs = {"resume": resume_command, "rerun": rerun_command, "show": show_command, "track": track_command}
    for name, command in on_runs.items():
        recorded = add(name, command)
        recorded.add_argument("run", metavar="RUN", type=Path, help="folder of a recorded run")
        if name in {"resume", "rerun"}:
            _add_set(recorded, "another layout field, such as layout.threads=2; may be repeated")
        elif name == "track":
            recorded.add_argument("--uri", default="sqlite:///mlflow.db", help="MLflow tracking store")
        else:
            recorded.add_argument("--samples", metavar="N", type=_count, default=5, help="last responses to print")
    compared = add("diff", diff_command)
    compared.add_argument("a", metavar="A", type=Path, help="folder of a recorded run")
    compared.add_argument("b", metavar="B", type=Path, help="folder of another")
    return parser


def _one_line(error: Exception) -> str:
    """The message; what it quotes, of a user's own exception say, may have had several lines."""
    return " ".join(str(error).splitlines())


def _say(line: str) -> None:
    """One line on stderr; of several processes only the first one speaks."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)


def _run(argv: Sequence[str]) -> int:
    try:
        arguments = build_parser().parse_args(argv)
        if _processes()[1] > 1 and arguments.command not in (run_command, rerun_command):
            raise UserError("only run and rerun work in several processes; start this command without torchrun")
        return int(arguments.command(arguments))
    except UserError as error:
        _say(f"error: {_one_line(error)}")
        return 2
    except PromiseBroken as error:
        _say(f"promise broken: {_one_line(error)}")
        return 1
    except Terminated:
        print("terminated; complete iterations are kept", file=sys.stderr)
        return 143
    except KeyboardInterrupt:
        _say("interrupted; complete iterations are kept")
        return 130
    except BrokenPipeError:
        # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _terminate(number: int, frame: object) -> NoReturn:
    raise Terminated


def main() -> None:
    """Entry point. Exit 0 done, 1 a promise did not hold, 2 what the user wrote is wrong, 130 Ctrl-C, 143 SIGTERM."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(_run(sys.argv[1:]))
