"""Make the environment of TRL: a virtual environment with pinned versions, which later calls use again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from ppo_repro.base.errors import UserError

TORCH = "2.13.0"
PINS = ("trl==1.12.0", "transformers==5.12.1", "accelerate==1.15.0", "datasets==5.2.0", "numpy==2.3.5")
STAMP = "peer.txt"


def torch_requirement(listed: str) -> list[str]:
    """Return the arguments of `pip install` for the CPU build of torch, from the output of `pip index versions torch`.

    The build is the one named +cpu if the index has it, else the build of PyTorch's own index.
    """
    if re.search(rf"(?<![\d.]){re.escape(TORCH)}\+cpu(?![\w.])", listed):
        return [f"torch=={TORCH}+cpu"]
    return [f"torch=={TORCH}", "--index-url", "https://download.pytorch.org/whl/cpu"]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"{' '.join(command[:4])} ...: failed ({last}); the environment of the peer cannot be made")
    return done.stdout


def make(folder: Path) -> Path:
    """Return the Python of an environment with TRL in `folder`, which is made if absent.

    Raises UserError if that fails.
    """
    python, stamp = folder / "bin" / "python", folder / STAMP
    pins = "\n".join((f"torch=={TORCH}", *PINS)) + "\n"
    if not (stamp.exists() and stamp.read_text(encoding="utf-8") == pins):
        _run([sys.executable, "-m", "venv", str(folder)])
        pip = [str(python), "-m", "pip"]
        torch = torch_requirement(_run([*pip, "index", "versions", "torch"]))
        _run([*pip, "install", "--quiet", *torch])
        _run([*pip, "install", "--quiet", *PINS])
        stamp.write_text(pins, encoding="utf-8")
    return python
