"""Memory of kernels: arrays that start at a cache line, and freed memory that is kept.

Loading a vector or a row of a tile that lies across two lines takes two accesses: AMX products of operands in L1 took
2.9 times as long when the operands were shifted by 16 bytes.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite.ir import IRBuilder as Builder
from numba import types
from numba.extending import intrinsic

from ppo_repro.numerics.kernels.core.compile import inline

LINE = 64  # bytes
# numbers of options of glibc's mallopt, and bytes
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT, _OWN_MAPPING = 128 << 20, 4 << 20


@cache
def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next arrays, but give back arrays of 4 MiB and more; only in glibc.

    By default it gives most of what lies at the end back at once, and the system clears every page of it again: a
    twelfth of the time of a small model's training. And it keeps arrays of up to 32 MiB, which fit others of another
    size badly: the operands of one model's matrices left 1 of 17 GB in holes while another model was trained.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _OWN_MAPPING)
        mallopt(_TRIM_THRESHOLD, _KEPT)


def empty_bytes(count: int) -> np.ndarray:
    """int8 [count], not initialised, at an address that is a multiple of LINE."""
    return torch.empty(count, dtype=torch.int8).numpy()  # NumPy aligns to 16, torch's allocator to 64


def zero_bytes(count: int) -> np.ndarray:
    """int8 [count] of zeros at an address that is a multiple of LINE."""
    return torch.zeros(count, dtype=torch.int8).numpy()


@inline
def align_to_line(array):  # type: ignore[no-untyped-def]
    """A flat array from its first element at a line on, for use in kernels; allocate LINE bytes more than needed."""
    return array[(-array.ctypes.data % 64) // array.itemsize :]


def _as_pointer(kind: types.Type) -> Any:
    """An intrinsic that makes a pointer of an address."""

    @intrinsic
    def convert(_: Any, address: Any) -> Any:
        def generate(context: Any, b: Builder, signature: Any, args: Any) -> Any:
            return b.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return convert


# of an address, a pointer to numbers; who has only an address must keep the array alive
floats, doubles = _as_pointer(types.float32), _as_pointer(types.float64)
integers, small_integers = _as_pointer(types.int64), _as_pointer(types.int32)
