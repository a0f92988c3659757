"""The backend that computes the exact numerics on this machine. It changes the speed, but no bit of a result.

`eager` is the specification in torch, on any device. On CPUs Numba kernels replace it, with matrix products in float64
(`float64`) or in 8-bit integers on AMX tiles (`amx`), on CUDA devices Triton's (`triton`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TypeVar

import torch
from numba.core import config as numba_config
from torch import Tensor

from ppo_repro.errors import UserError
from ppo_repro.numerics.kernels.core import pool
from ppo_repro.numerics.kernels.core.environment import EMULATED_AMX
from ppo_repro.numerics.kernels.core.memory import keep_freed_memory

BACKENDS = ("eager", "float64", "amx")  # of CPUs
TRITON = "triton"

_SMALLEST = [5e-324]  # in a list, so that the compiler does not compute with it

_active = "eager"

A = TypeVar("A")
B = TypeVar("B")


def has_amx() -> bool:
    """Whether this CPU has AMX int8 tiles, this process may use them and kernels are compiled for this CPU.

    Also where they are emulated, for tests.
    """
    if EMULATED_AMX:
        return True
    other_target = numba_config.CPU_NAME not in (None, "host") or numba_config.CPU_FEATURES is not None
    return not other_target and bool(torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx())


def has_triton_installed() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec(TRITON) is not None


def choose(backend: str, device: str = "cpu") -> str:
    """The backend for a name (`auto`: the fastest on a device).

    UserError for another name, for `amx` on a CPU without it, and for `triton` where Triton is missing.
    """
    if backend not in ("auto", *BACKENDS, TRITON):
        raise UserError(f"layout.backend = {backend!r}: must be one of auto, {', '.join(BACKENDS)}, {TRITON}")
    if backend == "auto" and device != "cpu":
        return TRITON if has_triton_installed() else "eager"
    if backend == "auto":
        return "amx" if has_amx() else "float64"
    if backend == "amx" and not has_amx():
        raise UserError("layout.backend = amx: this CPU has no AMX int8 tiles; must be auto, float64 or eager here")
    if backend == TRITON and not has_triton_installed():
        raise UserError("layout.backend = triton: Triton is not installed; pip install 'ppo_repro[gpu]', or take eager")
    return backend


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


def use(backend: str, threads: int) -> str:
    """Compute with `choose(backend)` on `threads` threads from now on; returns its name.

    This holds for the whole process, like torch's own number of threads. UserError as `check_denormals`, because
    threads take the setting of the one that starts them.
    """
    global _active
    check_denormals()
    backend = choose(backend)
    pool.set_threads(threads)
    _active = backend
    torch.set_num_threads(threads if backend in ("eager", TRITON) else 1)
    keep_freed_memory()
    return backend


def side_by_side(first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
    """first() and second(), which must not depend on each other; in parallel where kernels have two threads.

    Both see the grad mode of the caller. The first exception is raised here when both have ended.
    """
    if _active in ("eager", TRITON):
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
    """Whether kernels for CPUs replace the eager code for this tensor."""
    return _active not in ("eager", TRITON) and x.device.type == "cpu"


def device_of_kernels() -> torch.device:
    """Where the kernels in use compute; in Triton's interpreter that is the CPU."""
    if _active != TRITON:
        return torch.device("cpu")
    from ppo_repro.numerics.kernels.triton.launch import INTERPRETED

    return torch.device("cpu" if INTERPRETED else "cuda")


def has_triton(x: Tensor) -> bool:
    """Whether Triton's kernels replace the eager code for this tensor; they are imported after this says so."""
    if _active != TRITON:
        return False
    from ppo_repro.numerics.kernels.triton.launch import runs_on

    return runs_on(x)
