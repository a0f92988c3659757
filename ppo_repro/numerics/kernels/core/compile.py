"""How kernels are compiled: every operation rounded as written, the GIL released, machine code cached on disk.

Fast-math flags are used only for sums that are exact in every order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba.core import config as numba_config

from ppo_repro.numerics.kernels.core.cache import KernelCacheLocator, cache_folder

F = TypeVar("F", bound=Callable[..., Any])


_FOLDER = cache_folder()
_LOCATOR = f"{KernelCacheLocator.__module__}.{KernelCacheLocator.__name__}"


def _compile(function: F, fastmath: set[str] | bool) -> F:
    before = numba_config.CACHE_DIR, numba_config.CACHE_LOCATOR_CLASSES
    numba_config.CACHE_DIR, numba_config.CACHE_LOCATOR_CLASSES = _FOLDER, _LOCATOR
    try:
        return numba.njit(nogil=True, error_model="numpy", cache=True, fastmath=fastmath)(function)
    finally:
        numba_config.CACHE_DIR, numba_config.CACHE_LOCATOR_CLASSES = before


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
