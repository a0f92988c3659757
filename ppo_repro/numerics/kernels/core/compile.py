"""How kernels are compiled: no fast-math beyond sums already proven exact, the GIL released, cached on disk."""

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
    """SHA-256 over the version of Numba and every file kernels are made from: those of `kernels` and `arithmetic`."""
    digest = hashlib.sha256(numba.__version__.encode())
    for folder in ("arithmetic", "kernels"):
        for source in sorted((numerics / folder).rglob("*.py")):
            digest.update(f"{source.relative_to(numerics).as_posix()} {len(source.read_bytes())}\n".encode())
            digest.update(source.read_bytes())
    return digest.hexdigest()


def _cache_folder() -> Path:
    """One folder for each state of the kernel sources.

    Numba looks only at the file that defines a kernel; it would go on using machine code made from an older
    version of what the kernel takes from other files.
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
    """Compile at the first call; every operation is rounded separately, in the order written.

    `error_model="numpy"` because a test for a zero divisor keeps loops from being vectorised.
    """
    return _compile(function, False)


def exact_sum(function: F) -> F:
    """Like `kernel`, for sums that are exact in every order: they may be reordered and use fused multiply-add.

    `nsz` stays off: it may change the sign of a zero.
    """
    return _compile(function, {"reassoc", "contract"})


def inline(function: F) -> F:
    """A small scalar function put into its callers before they are compiled."""
    return numba.njit(inline="always", error_model="numpy")(function)
