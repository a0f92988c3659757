"""How kernels are compiled: no fast-math beyond sums already proven exact, the GIL released, cached on disk."""

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
