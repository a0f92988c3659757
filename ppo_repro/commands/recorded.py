"""Commands on recorded runs. Heavy imports wait until a command runs: --help stays quick."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ppo_repro.base.analyses import analysis
from ppo_repro.base.clock import duration
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import MANIFEST, folders_with
from ppo_repro.base.latest import RUNS, written_at
from ppo_repro.base.output import print_json, print_result, say, tell
from ppo_repro.records.run_state import state_of

if TYPE_CHECKING:
    from ppo_repro.records.diff import Difference


SPARED = ("fingerprint", "iterations", "age", "tags")  # columns of the list that a narrow terminal loses, in this order


def show_command(arguments: argparse.Namespace) -> int:
    """Print the results of a run, list the runs of a folder, or give a run a name, notes or tags."""
    if any(text is not None for text in (arguments.name, arguments.notes, arguments.tag)):
        return _label(arguments)
    if not arguments.run.is_dir():
        raise UserError(f"{arguments.run}: no such folder; give a run, or the folder that runs went to")
    if not (arguments.run / MANIFEST).exists():
        return _list(arguments.run, arguments.json)
    return _show(arguments)


def _list(folder: Path, as_json: bool) -> int:
    """List the runs of a folder, the newest first: name, state, score, what differs, fingerprint, age."""
    from ppo_repro.records.settings import settings_of

    runs = sorted(map(_listed, folders_with(folder, MANIFEST)), key=lambda run: float(run["age_seconds"]))
    setups = [run.pop("setup") for run in runs]
    whole = [run for run, setup in zip(runs, setups, strict=True) if setup]
    for run, setting in zip(whole, settings_of(list(filter(None, setups))), strict=True):
        run |= {"differs": setting.short, "differs_in": setting.whole}
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    print_result(as_json, {"runs": runs}, lines_of(runs, folder, width))
    return 0


def _listed(run_dir: Path) -> dict[str, Any]:
    """Describe one run folder; its state is `damaged` if a file that the description needs cannot be read."""
    from ppo_repro.records import manifest
    from ppo_repro.records.changes import setup_of
    from ppo_repro.records.label import UNLABELLED, read_label
    from ppo_repro.runs.results import score_of

    listed: dict[str, Any] = {"folder": str(run_dir), "kind": "-", "state": "damaged", "iterations": 0, "score": None}
    listed |= {"differs": "", "differs_in": "", "fingerprint": "-", "setup": None, **UNLABELLED.model_dump()}
    listed["age_seconds"] = max(time.time() - written_at(run_dir), 0.0)  # since the manifest was written
    try:
        head, label = manifest.load_head(run_dir), read_label(run_dir)
        setup, score = setup_of(run_dir, head), score_of(run_dir, head)
    except UserError:
        return listed
    found = {"kind": head.kind, "state": state_of(run_dir, head.status), "iterations": head.num_iterations}
    return {**listed, **found, "score": score, "fingerprint": head.fingerprint, "setup": setup, **label.model_dump()}


def lines_of(runs: list[dict[str, Any]], root: Path, width: float) -> list[str]:
    """Return the lines of a table of runs without empty columns; if it is too wide, without columns of SPARED."""
    if not runs:
        return [f"no run in {root}"]
    columns = {
        "run": [run["folder"] for run in runs],
        "name": [run["name"] for run in runs],
        "state": [run["state"] for run in runs],
        "iterations": [str(run["iterations"]) for run in runs],
        "score": ["" if run["score"] is None else f"{run['score']:.3f}" for run in runs],
        "what differs": [run["differs"] for run in runs],
        "tags": [" ".join(run["tags"]) for run in runs],
        "fingerprint": [run["fingerprint"][:12] for run in runs],
        "age": [duration(run["age_seconds"]) for run in runs],
    }
    padded = {}
    for name, cells in columns.items():
        if any(cells):
            longest = max(map(len, (name, *cells)))
            is_number = name in ("iterations", "score")
            padded[name] = [cell.rjust(longest) if is_number else cell.ljust(longest) for cell in (name, *cells)]
    spared = []
    for name in SPARED:
        if name in padded and len("  ".join(cells[0] for cells in padded.values())) > width:
            del padded[name]
            spared.append(name)
    lines = ["  ".join(row).rstrip() for row in zip(*padded.values(), strict=True)]
    return [*lines, f"the terminal is too narrow for: {', '.join(spared)}"] if spared else lines


def _label(arguments: argparse.Namespace) -> int:
    """Give a run a name, notes or tags, or remove them by an empty text; print the label."""
    from ppo_repro.records import manifest
    from ppo_repro.records.label import label_of, read_label, write_label

    manifest.load_head(arguments.run)
    before = read_label(arguments.run)
    label = label_of(arguments.name, arguments.notes, arguments.tag, before)
    if label != before:
        write_label(arguments.run, label)
    print_result(arguments.json, {"folder": str(arguments.run), **label.model_dump()}, label.lines() or ["no label"])
    return 0


def verify_command(arguments: argparse.Namespace) -> int:
    """Check every file of a run by its digest, then compute rewards, advantages and losses again from the records."""
    say(f"{arguments.run}: every byte beside its recorded digest")
    from ppo_repro.records import manifest
    from ppo_repro.runs.verify_files import verify_files

    recorded = manifest.load(arguments.run)
    whole = verify_files(arguments.run, recorded)
    whole = dataclasses.replace(whole, status=state_of(arguments.run, recorded.status))
    again, lines = None, whole.lines()
    if not arguments.files:
        say(f"{arguments.run}: computing from the records alone")
        from ppo_repro.runs.verify_stages import recompute

        again = recompute(arguments.run, recorded)
        if not manifest.has_responses(recorded):
            lines.append(f"only its files were checked; `ppo-repro rerun` computes a {recorded.kind} run again")
    fields = {"recomputed": None if again is None else dataclasses.asdict(again)}
    print_result(arguments.json, dataclasses.asdict(whole) | fields, lines + (again.lines() if again else []))
    return 1 if again is not None and again.difference is not None else 0


def _show(arguments: argparse.Namespace) -> int:
    """Print the state, results and last responses of a run."""
    from ppo_repro.records import manifest
    from ppo_repro.records.label import read_label

    run_dir = arguments.run
    recorded = manifest.load(run_dir)
    begun = {
        "run_dir": str(run_dir),
        "fingerprint": recorded.fingerprint,
        "status": state_of(run_dir, recorded.status),
        "iterations": recorded.num_iterations,
    }
    if not arguments.json:
        tell("{run_dir}: {status}, {iterations} iterations\nfingerprint {fingerprint}".format(**begun))
        if recorded.origin is not None:
            from ppo_repro.records.changes import origin_lines

            tell("\n".join(origin_lines(recorded.origin)))
        if label := read_label(run_dir).lines():
            tell("\n".join(label))
    from ppo_repro.runs.summary import iteration_lines, sample_lines, summarise

    if arguments.json:
        print_json(summarise(run_dir).figures if recorded.status == "complete" else begun)
        return 0
    if recorded.iterations:
        tell(iteration_lines(run_dir, recorded.kind, 12))
    if recorded.iterations and manifest.has_responses(recorded):
        tell("\n".join(sample_lines(run_dir, len(recorded.iterations) - 1, arguments.samples)))
    if recorded.status == "complete":
        summary = summarise(run_dir)
        tell("\n".join([*summary.sentences, *summary.speeds]))
    return 0


def diff_command(arguments: argparse.Namespace) -> int:
    """Compare configurations and inputs of two recorded runs, then every bit; exit 1 at a different bit."""
    say(f"{arguments.a} beside {arguments.b}, bit by bit")
    from ppo_repro.records.changes import change_lines, setup_changes
    from ppo_repro.records.diff import first_difference

    changed = setup_changes(arguments.a, arguments.b)
    difference = first_difference(arguments.a, arguments.b)
    if changed and not arguments.json:
        tell("\n".join(["configuration and inputs, A -> B:", *(f"  {line}" for line in change_lines(changed))]))
    elif difference is not None and not arguments.json:
        tell("configuration and inputs: the same")
    return report_difference(difference, arguments.json, "identical", {"setup": changed})


def report_difference(
    difference: Difference | None, as_json: bool, identical: str, more: Mapping[str, Any] = MappingProxyType({})
) -> int:
    """Print the result of a comparison and return the exit code.

    Args:
        identical: the line to print if there is no difference.
        more: more fields of the JSON object.
    """
    fields = None if difference is None else dataclasses.asdict(difference)
    line = identical if difference is None else f"different: {difference.describe()}"
    print_result(as_json, {"identical": difference is None, "first_difference": fields, **more}, [line])
    return 0 if difference is None else 1


def report_command(arguments: argparse.Namespace) -> int:
    """Write one HTML page about a recorded run, about two side by side, or about the runs of a folder."""
    if len(arguments.runs) > 2:
        raise UserError(f"report: {len(arguments.runs)} folders; give one, or two runs, or the folder of many")
    say(f"{' and '.join(map(str, arguments.runs))}: writing a page")
    path, size = analysis("report.build").write_report(arguments.runs, arguments.out)
    print_result(arguments.json, {"report": str(path), "bytes": size}, [f"report      {path} ({size / 1e6:.2f} MB)"])
    return 0


def view_command(arguments: argparse.Namespace) -> int:
    """Serve a page on this machine over all responses of runs: search, filters, tokens; Ctrl-C ends it."""
    folders = arguments.folders or [RUNS]
    say(f"{' and '.join(map(str, folders))}: a page over the responses")
    server = analysis("view.server", "duckdb", "starlette", "uvicorn").Server(folders, arguments.port)
    line = f"view        {server.address}\nonly this machine reaches it, and only with the token; Ctrl-C ends it"
    tell(json.dumps({"view": server.address}) if arguments.json else line, secrets=True)
    server.serve()
    return 0


def track_command(arguments: argparse.Namespace) -> int:
    """Copy a recorded run or grid into MLflow or W&B, or with --tensorboard into event files."""
    from ppo_repro.records.grid import CELLS
    from ppo_repro.records.reader import open_manifest
    from ppo_repro.tracking.follower import MLFLOW, copy, targets_of

    asked = [] if arguments.uri is None else [arguments.uri]
    targets = targets_of(asked if asked or arguments.tensorboard else [MLFLOW], arguments.tensorboard)
    if not (arguments.run / CELLS).exists():  # before the seconds that MLflow takes to import
        open_manifest(arguments.run, allow_incomplete=True)
    lines, fields = list[str](), dict[str, Any]()
    for target in targets:
        say(f"{arguments.run}: copying it into {target.place or target.kind}")
        with redirect_stdout(sys.stderr):  # stdout is for the result alone
            copies = copy(arguments.run, target)
        lines += copies.lines
        fields |= copies.fields
    print_result(arguments.json, fields, lines)
    return 0
