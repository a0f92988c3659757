"""Read the kernels' interface from `c/interface.h` by cffi: structs, numbers and pointers.

An example:

    matrix = ffi.new("Matrix *", {"n": 3, "k": 5, "grad": -1})  # zeros elsewhere; freed with the object
    matrix.w = pointer(weight)  # keeps no memory alive: the owner of the struct keeps the tensor
    library.load().pack(matrix)
    constants.KEEP_ALL
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from cffi import FFI
from torch import Tensor

from ppo_repro.numerics.build import SOURCES

CPU = torch.device("cpu")
Ints = np.ndarray  # int32, contiguous
Struct = Any  # a pointer to a C struct; its members are attributes

ffi = FFI()
for header in ("interface.h", "gpu/driver.h"):
    ffi.cdef((SOURCES / header).read_text())
constants = ffi.dlopen(None)  # the members of the header's enums

_POINTERS = {
    torch.float32: ffi.typeof("float *"),
    torch.float64: ffi.typeof("double *"),
    torch.int32: ffi.typeof("int *"),
    torch.int64: ffi.typeof("int64_t *"),
    torch.bool: ffi.typeof("uint8_t *"),
}
_INTS = ffi.typeof("int[]")


def ints(values: Sequence[int] | np.ndarray | Tensor) -> Ints:
    """Return values as a contiguous int32 array."""
    return np.ascontiguousarray(values.numpy() if isinstance(values, Tensor) else values, np.int32)


def pointer(array: Ints | Tensor | None, device: torch.device = CPU) -> Any:
    """Return a pointer to the memory of an array or tensor, of its type in C; NULL for None.

    Raises ValueError unless a tensor is contiguous on the device. cffi raises TypeError if C wants another type.
    """
    if array is None:
        return ffi.NULL
    if not isinstance(array, Tensor):
        return ffi.from_buffer(_INTS, array)
    if array.device.type != device.type or not array.is_contiguous():
        layout = "contiguous" if array.is_contiguous() else f"strides {array.stride()}"
        raise ValueError(f"expected a contiguous tensor on {device}, got {array.dtype} on {array.device}, {layout}")
    return ffi.cast(_POINTERS[array.dtype], array.data_ptr())


def names(enum: str, prefix: str) -> tuple[str, ...]:
    """Return the members of an enum in lower case and without the prefix, in the order of their numbers."""
    members: dict[int, str] = ffi.typeof(enum).elements
    return tuple(members[i].removeprefix(prefix).lower() for i in range(len(members)))
