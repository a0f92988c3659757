"""How kernels are compiled: no fast-math beyond sums already proven exact, the GIL released, cached on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile at the first call; every operation is rounded separately, in the order written.

    `error_model="numpy"` because a test for a zero divisor keeps loops from being vectorised.
    """
    return numba.njit(nogil=True, error_model="numpy", cache=True)(function)


def inline(function: F) -> F:
    """A small scalar function put into its callers before they are compiled."""
    return numba.njit(inline="always", error_model="numpy")(function)


def exact_sum(function: F) -> F:
    """Like `kernel`, for sums that are exact in every order: they may be reordered and use fused multiply-add.

    `nsz` stays off: it may change the sign of a zero.
    """
    return numba.njit(nogil=True, error_model="numpy", cache=True, fastmath={"reassoc", "contract"})(function)
