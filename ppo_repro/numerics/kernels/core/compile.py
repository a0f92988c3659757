"""How kernels are compiled: every operation rounded as written, the GIL released, machine code cached on disk.

Fast-math flags are used only for sums that are exact in every order.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import config as numba_config

F = TypeVar("F", bound=Callable[..., Any])


def sources_digest(numerics: Path) -> str:
    """SHA-256 over the version of Numba and the names and bytes of all files in `kernels` and `arithmetic`.

    Kernels take constants and functions from no other folder of the package.
    """
    digest = hashlib.sha256(numba.__version__.encode())
    for folder in ("arithmetic", "kernels"):
        for source in sorted((numerics / folder).rglob("*.py")):
            digest.update(f"{source.relative_to(numerics).as_posix()} {len(source.read_bytes())}\n".encode())
            digest.update(source.read_bytes())
    return digest.hexdigest()


def _cache_folder() -> Path:
    """A folder of its own for each state of the kernel sources.

    Numba checks only the file that defines a kernel. It would reuse stale machine code after a change in a file from
    which the kernel takes a constant or a function.
    """
    digest = sources_digest(Path(__file__).parents[2])
    base = numba_config.CACHE_DIR or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ppo_repro" / f"kernels-{digest[:16]}"


_FOLDER = str(_cache_folder())


def _compile(function: F, fastmath: set[str] | bool) -> F:
    previous, numba_config.CACHE_DIR = numba_config.CACHE_DIR, _FOLDER
    try:
        return numba.njit(nogil=True, error_model="numpy", cache=True, fastmath=fastmath)(function)
    finally:
        numba_config.CACHE_DIR = previous


def kernel(function: F) -> F:
    """Compile at the first call; every operation is rounded by itself, in the order written.

    `error_model="numpy"`: Python's check for a zero divisor would prevent loops from being vectorised.
    """
    return _compile(function, False)


def exact_sum(function: F) -> F:
    """Like `kernel`, for sums that are exact in every order: the compiler may reorder them and fuse multiply and add.

    `nsz` stays off, because it may change the sign of a zero.
    """
    return _compile(function, {"reassoc", "contract"})


def inline(function: F) -> F:
    """A small function that is inlined into its callers before they are compiled."""
    return numba.njit(inline="always", error_model="numpy")(function)
