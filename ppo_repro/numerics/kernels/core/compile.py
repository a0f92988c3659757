"""How kernels are compiled: every operation rounded as written, the GIL released, machine code kept on disk.

Fast-math flags are used only for sums that are exact in every order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba.core import config as numba_config

from ppo_repro.numerics.kernels.core.cache import KernelCache

F = TypeVar("F", bound=Callable[..., Any])


def _compile(function: F, fastmath: set[str] | bool) -> F:
    # a wrapper for calls from C, which nobody makes, would be a tenth of the time of compiling
    options = {"nogil": True, "error_model": "numpy", "fastmath": fastmath, "no_cfunc_wrapper": True}
    compiled = numba.njit(**options)(function)
    if not numba_config.DISABLE_JIT:
        compiled._cache = KernelCache(function)  # Numba has no public way to name another cache
    return compiled


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
