"""What computes the exact numerics on this machine: a choice of speed that no result can show.

`eager` is the specification in torch, on any device. On CPUs Numba kernels take its place, with matrix
products in float64 (`dgemm`) or in 8-bit integers on AMX tiles (`amx`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from numba.core import config as numba_config
from torch import Tensor

from ppo_repro.errors import UserError
from ppo_repro.numerics.kernels.core import pool

BACKENDS = ("eager", "dgemm", "amx")

_active = "eager"

A = TypeVar("A")
B = TypeVar("B")


def has_amx() -> bool:
    """Whether this CPU has AMX int8 tiles, the system lets this process use them and kernels are compiled for it."""
    compiled_for_another = numba_config.CPU_NAME not in (None, "host") or numba_config.CPU_FEATURES is not None
    return not compiled_for_another and bool(torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx())


def choose(backend: str) -> str:
    """The backend that a name stands for here (`auto`: the fastest); UserError for `amx` on a CPU without it."""
    if backend == "auto":
        return "amx" if has_amx() else "dgemm"
    if backend == "amx" and not has_amx():
        raise UserError("layout.backend = amx: this CPU has no AMX int8 tiles; must be auto, dgemm or eager here")
    return backend


def use(backend: str, threads: int) -> str:
    """Compute with `choose(backend)` on so many threads; returns its name.

    Process-wide, as torch's own number of threads is.
    """
    global _active
    backend = choose(backend)
    _active = backend
    pool.set_threads(threads)
    torch.set_num_threads(threads if backend == "eager" else 1)
    return backend


def side_by_side(first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
    """first() and second(), which must not depend on each other, at the same time where kernels have two threads.

    Both see the grad mode of the caller. The first exception is raised here when both have ended.
    """
    if _active == "eager":
        return first(), second()
    recording = torch.is_grad_enabled()

    def other() -> B:
        with torch.set_grad_enabled(recording):  # each thread has its own
            return second()

    return pool.both(first, other)


def active() -> str:
    """The backend in use."""
    return _active


def has_kernels(x: Tensor) -> bool:
    """Whether kernels take the place of the eager code for this tensor."""
    return _active != "eager" and x.device.type == "cpu"
