"""Which code computes the exact numerics: `float64`, Numba kernels, or `eager`, their specification in torch.

Both give the same bits. Runs use `float64`; native numerics and tests use `eager`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch import Tensor

from ppo_repro.errors import UserError
from ppo_repro.numerics import library
from ppo_repro.numerics.kernels.core import pool
from ppo_repro.numerics.kernels.core.memory import keep_freed_memory

Backend = Literal["float64", "eager"]

_SMALLEST = [5e-324]  # in a list, so that the compiler does not compute with it

_active: Backend = "eager"

A = TypeVar("A")
B = TypeVar("B")


def of_mode(mode: str) -> Backend:
    """The backend of a run whose `numerics.mode` is `mode`."""
    return "float64" if mode == "exact" else "eager"


def flushes_denormals() -> bool:
    """Whether this thread takes the smallest numbers for zeros."""
    return _SMALLEST[0] * 1.0 == 0.0


def check_denormals() -> None:
    """UserError where this thread flushes denormal numbers to zero: other threads may not, and bits would differ."""
    if flushes_denormals():
        raise UserError(
            "denormal numbers are flushed to zero here, by torch.set_flush_denormal or a library that was built with "
            "-ffast-math; call torch.set_flush_denormal(False) first"
        )


def use(backend: Backend, threads: int) -> None:
    """Compute with a backend on `threads` threads from now on.

    This holds for the whole process, like torch's own number of threads. UserError as `check_denormals`, because
    threads take the setting of the one that starts them.
    """
    global _active
    library.set_threads(threads)
    pool.set_threads(threads)
    _active = backend
    torch.set_num_threads(threads if backend == "eager" else 1)
    keep_freed_memory()


def side_by_side(first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
    """first() and second(), which must not depend on each other; in parallel where kernels have two threads.

    Both see the grad mode of the caller. The first exception is raised here when both have ended.
    """
    if _active == "eager":
        return first(), second()
    recording = torch.is_grad_enabled()

    def other() -> B:
        with torch.set_grad_enabled(recording):  # each thread has its own
            return second()

    return pool.both(first, other)


def active() -> Backend:
    """The backend in use."""
    return _active


def has_kernels(x: Tensor) -> bool:
    """Whether kernels replace the eager code for this tensor."""
    return _active == "float64" and x.device.type == "cpu"
