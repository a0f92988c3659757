"""Make the environment of a peer: a virtual environment with pinned versions, which later calls use again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ppo_repro.base.errors import UserError

TORCH = "2.13.0"
PINS = ("trl==1.12.0", "transformers==5.12.1", "accelerate==1.15.0", "datasets==5.2.0", "numpy==2.3.5")
# llama.cpp comes as source and is built here for this processor: a C++ compiler, and minutes
LLAMA_CPP = ("llama-cpp-python==0.3.36", "gguf==0.19.0", "numpy==2.3.5", "safetensors==0.7.0")
LLAMA_CPP_BUILD = {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF"}  # without what reads images and fetches files
STAMP = "peer.txt"


def torch_requirement(listed: str) -> list[str]:
    """Return the arguments of `pip install` for the CPU build of torch, from the output of `pip index versions torch`.

    The build is the one named +cpu if the index has it, else the build of PyTorch's own index.
    """
    if re.search(rf"(?<![\d.]){re.escape(TORCH)}\+cpu(?![\w.])", listed):
        return [f"torch=={TORCH}+cpu"]
    return [f"torch=={TORCH}", "--index-url", "https://download.pytorch.org/whl/cpu"]


def _run(command: list[str], settings: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(settings or {})})
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"{' '.join(command[:4])} ...: failed ({last}); the environment of the peer cannot be made")
    return done.stdout


def make(folder: Path) -> Path:
    """Return the Python of an environment with TRL in `folder`, which is made if absent.

    Raises UserError if that fails.
    """
    pins = (f"torch=={TORCH}", *PINS)
    if not _is_made(folder, pins):
        pip = _new(folder)
        torch = torch_requirement(_run([*pip, "index", "versions", "torch"]))
        _run([*pip, "install", "--quiet", *torch])
        _run([*pip, "install", "--quiet", *pins])
    return _stamped(folder, pins)


def make_llama_cpp(folder: Path) -> Path:
    """Return the Python of an environment with llama.cpp in `folder`, which is made if absent.

    Raises UserError if that fails.
    """
    if not _is_made(folder, LLAMA_CPP):
        _run([*_new(folder), "install", "--quiet", *LLAMA_CPP], LLAMA_CPP_BUILD)
    return _stamped(folder, LLAMA_CPP)


def _new(folder: Path) -> list[str]:
    """Make a virtual environment, and return the command of its pip."""
    _run([sys.executable, "-m", "venv", str(folder)])
    return [str(folder / "bin" / "python"), "-m", "pip"]


def _is_made(folder: Path, pins: Sequence[str]) -> bool:
    stamp = folder / STAMP
    return stamp.exists() and stamp.read_text(encoding="utf-8") == "\n".join(pins) + "\n"


def _stamped(folder: Path, pins: Sequence[str]) -> Path:
    """Write the installed versions into the folder, and return the environment's Python."""
    (folder / STAMP).write_text("\n".join(pins) + "\n", encoding="utf-8")
    return folder / "bin" / "python"
