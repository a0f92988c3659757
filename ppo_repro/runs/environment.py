"""Describe the environment of a run, which no fingerprint includes: versions, processor, threads, code."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ppo_repro import __version__
from ppo_repro.base.errors import UserError
from ppo_repro.base.ranks import Ranks
from ppo_repro.config.control import ControlConfig
from ppo_repro.config.kinds import AnyConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.config.tasks import ReasoningGymTask
from ppo_repro.numerics import build, library

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pandas", "pyarrow", "pydantic")


def _git(*arguments: str) -> str:
    """Return the output of a git command in the checkout of this package; empty if there is no checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""  # a wheel has no checkout: a repository above it is another project
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def code_digest() -> str:
    """Return the SHA-256 of this package's source files, tracked by git or not. A wheel's is the checkout's."""
    root = Path(__file__).resolve().parents[1]
    sources = [path.relative_to(root) for path in sorted([*root.rglob("*.py"), *root.rglob("*.[ch]")])]
    sums = [
        f"{path.as_posix()} {hashlib.sha256((root / path).read_bytes()).hexdigest()}"
        for path in sources
        if path.parts[0] != "configurations"  # examples, which only a wheel has there
    ]
    return hashlib.sha256("\n".join(sums).encode()).hexdigest()


def require_same_versions(ranks: Ranks) -> None:
    """Raise UserError if a process has other code, kernels or packages than the first one.

    The variant of the kernels and the build of torch (`2.8.0+cpu`) may differ.
    """
    code = {"ppo_repro": __version__, "code": code_digest(), "kernels": build.digest()}
    versions = code | {name: metadata.version(name).partition("+")[0] for name in PACKAGES}
    for what, version in versions.items() if ranks.size > 1 else ():
        ranks.require_same(what, version, UserError)


def describe_code() -> dict[str, Any]:
    """Return digest and git commit of this package's code. This reads all its files."""
    return {
        "code_digest": code_digest(),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
    }


def describe_environment(config: AnyConfig, processes: int, code: Mapping[str, Any]) -> dict[str, Any]:
    """Return all facts outside the configuration that can make two runs differ; `code` is from `describe_code`."""
    packages = list(PACKAGES)
    if isinstance(config, RunConfig) and isinstance(config.task, ReasoningGymTask) and find_spec("reasoning_gym"):
        packages.append("reasoning-gym")
    if isinstance(config, ControlConfig):
        packages.append("gymnasium")
    return {
        "ppo_repro": __version__,
        "python": sys.version.split()[0],
        "packages": {name: metadata.version(name) for name in packages},
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_build": " ".join(torch.__config__.show().split())[:1000],
        "kernels": library.in_use(),
        "device": "cpu" if isinstance(config, ControlConfig) else config.layout.device,
        "threads": config.layout.threads,
        "processes": processes,
        "cores": os.cpu_count(),
        "numerics_mode": config.numerics.mode,
        **code,
    }
