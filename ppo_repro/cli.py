"""The command line. Heavy imports wait until a command needs them, so that --help is quick."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from ppo_repro.errors import PromiseBroken, UserError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="PPO on language models whose runs are reproducible to the last bit.",
)

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML configuration of a run.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a recorded run.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override one field; may be repeated.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False))


@app.command("run")
def run_command(
    config: ConfigArgument,
    overrides: SetOption = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where runs go.")] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Run PPO, record every buffer, print a summary."""
    from ppo_repro.config import load_config

    resolved = load_config(config, overrides or [])
    from ppo_repro.runs.progress import ConsoleProgress
    from ppo_repro.runs.run import run
    from ppo_repro.runs.summary import speeds, summarise, verdicts

    with ConsoleProgress() as watcher:
        run_dir, seconds = run(resolved, out, watcher)
    summary = summarise(run_dir, seconds)
    if as_json:
        _print_json(dataclasses.asdict(summary))
        return
    print("\n".join([*verdicts(summary, resolved.ppo.ratio_anchor), *speeds(summary)]))
    print(f"fingerprint {summary.fingerprint}")
    print(f"records     {run_dir}")
    print(f"policy      {run_dir / 'checkpoints' / 'final'}")
    print(f"again       ppo-repro rerun {run_dir}")


@app.command("rerun")
def rerun_command(run_dir: RunArgument, as_json: JsonOption = False) -> None:
    """Execute a recorded run again and compare every buffer; exit 1 at a difference."""
    from ppo_repro.records.reader import open_manifest

    open_manifest(run_dir)
    from ppo_repro.runs.progress import ConsoleProgress
    from ppo_repro.runs.run import rerun

    with ConsoleProgress() as watcher:
        report = rerun(run_dir, watcher)
    _report_difference(report.difference, as_json, f"identical: {report.iterations} iterations, {report.fingerprint}")


@app.command("diff")
def diff_command(
    left: Annotated[Path, typer.Argument(metavar="A", help="Folder of a recorded run.")],
    right: Annotated[Path, typer.Argument(metavar="B", help="Folder of another.")],
    as_json: JsonOption = False,
) -> None:
    """Compare two recorded runs bit by bit; exit 1 at a difference."""
    from ppo_repro.runs.diff import first_difference

    _report_difference(first_difference(left, right), as_json, "identical")


def _report_difference(difference: Any, as_json: bool, identical: str) -> None:
    if as_json:
        found = None if difference is None else dataclasses.asdict(difference)
        _print_json({"identical": difference is None, "first_difference": found})
    else:
        print(identical if difference is None else f"different: {difference.describe()}")
    if difference is not None:
        raise typer.Exit(1)


@app.command("show")
def show_command(
    run_dir: RunArgument,
    samples: Annotated[int, typer.Option("--samples", min=0, help="Responses of the last iteration to print.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Print what a recorded run did."""
    from ppo_repro.config import load_config
    from ppo_repro.records import reader
    from ppo_repro.runs.summary import iteration_lines, speeds, summarise, verdicts

    manifest = reader.open_manifest(run_dir, allow_incomplete=True)
    if as_json:
        _print_json(dataclasses.asdict(summarise(run_dir)))
        return
    print(f"{run_dir}: {manifest.status}, {len(manifest.iterations)} iterations, {manifest.fingerprint}")
    if not manifest.iterations:
        return
    print(iteration_lines(run_dir, 12).to_string(index=False, float_format=lambda x: f"{x:.4g}"))
    last = [len(manifest.iterations) - 1]
    columns = ["prompt", "response", "answer", "scores", "finish_reason"]
    responses = reader.read_sequences(run_dir, iterations=last, columns=columns, allow_incomplete=True)
    for row in responses.head(samples).itertuples():
        print(f"  {row.prompt!r} -> {row.response!r} (answer {row.answer!r}, {row.finish_reason}, score {row.scores:g})")
    if manifest.status == "complete":
        anchor = load_config(run_dir / "config.yaml").ppo.ratio_anchor
        summary = summarise(run_dir)
        print("\n".join([*verdicts(summary, anchor), *speeds(summary)]))


@app.command("probe")
def probe_command(config: ConfigArgument, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Check every invariance on this machine, with a negative control; exit 1 if one fails."""
    from ppo_repro.config import load_config

    resolved = load_config(config, overrides or [])
    from ppo_repro.numerics.probe import failures, probe, render

    rows = probe(resolved)
    failed = failures(rows)
    if as_json:
        _print_json({"rows": [dataclasses.asdict(row) for row in rows], "failures": failed})
    else:
        print(render(rows))
        print("\n".join(failed) or "every promise holds, and the control finds the differences it must find")
    if failed:
        raise typer.Exit(1)


def main() -> None:
    """Entry point: one line per error, exit code 2 for the user's, 1 for a broken promise, 130 for Ctrl-C."""
    try:
        code = app(standalone_mode=False)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except PromiseBroken as error:
        print(f"promise broken: {error}", file=sys.stderr)
        code = 1
    except click.exceptions.Abort:
        print("interrupted; complete iterations are kept", file=sys.stderr)
        code = 130
    except KeyboardInterrupt:
        print("interrupted; complete iterations are kept", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except click.ClickException as error:
        print(f"error: {error.format_message()} Try --help.", file=sys.stderr)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
