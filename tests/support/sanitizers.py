"""The kernels under address and undefined-behaviour sanitizers, and child processes that use them.

clang of ziglang instruments the kernels; the runtime of the address sanitizer is GCC's (Debian: libasan8), because
ziglang has none. A child that finds an error prints a report with the line in C and ends. As a pytest plugin
(`python -m pytest -p tests.support.sanitizers`) this module lets the tests of a child run use the sanitized library.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from ctypes.util import find_library
from pathlib import Path

from ppo_repro.numerics import build, library
from tests.support.paths import ROOT
from tests.support.variants import FASTEST

RUNTIME = find_library("asan")
_LIBRARY = "PPO_REPRO_SANITIZED_KERNELS"
_FLAGS = (
    *("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=undefined", "-fno-sanitize-trap=all"),
    *("-Xclang", "-fsanitize=address", "-Wl,-z,undefs"),  # the runtime's symbols are found when a process starts
)


def compile_sanitized(folder: Path, variant: build.Variant = FASTEST.variants[0], *more_flags: str) -> Path:
    """Compile a variant of the kernels with both sanitizers into a folder; CalledProcessError if that fails."""
    out = folder / f"sanitized-{variant.name}.so"
    command = [*build.compiler(FASTEST.target), *build.LIBRARY_FLAGS, *variant.flags, *_FLAGS, *more_flags]
    environment = build.compiler_environment(folder / "zig")
    subprocess.run([*command, "all.c", "-o", str(out)], cwd=build.SOURCES, env=environment, check=True)
    return out


def run_sanitized(path: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` at the top of the checkout, where `path` is the library that the plugin loads."""
    environment = os.environ | {
        "LD_PRELOAD": f"{RUNTIME} {find_library('stdc++')}",  # with it first, C++ exceptions of torch reach the runtime
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter keeps memory to its end
        "OMP_NUM_THREADS": "1",
        _LIBRARY: str(path),
    }
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def pytest_configure() -> None:
    """Let every test of this process use the sanitized library."""
    library.load = functools.cache(lambda: library.open_library(Path(os.environ[_LIBRARY])))
