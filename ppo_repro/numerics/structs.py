"""Tensors and arrays as the C kernels take them: pointers to contiguous memory, and the structs of their sources."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_repro.numerics.build import SOURCES

Ints = np.ndarray  # int32, contiguous


def ints(values: Sequence[int] | np.ndarray | Tensor) -> Ints:
    """Values as a contiguous int32 array."""
    return np.ascontiguousarray(values.numpy() if isinstance(values, Tensor) else values, np.int32)


def address(array: Ints | Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
    """The address of an array or tensor; None for NULL. ValueError unless a tensor is contiguous on the CPU."""
    if not isinstance(array, Tensor):
        return None if array is None else int(array.ctypes.data)
    if array.dtype != dtype or array.device.type != "cpu" or not array.is_contiguous():
        layout = "contiguous" if array.is_contiguous() else f"strides {array.stride()}"
        raise ValueError(f"{array.dtype} on {array.device}, {layout}, where a contiguous {dtype} on the CPU is due")
    return array.data_ptr()


_KINDS = {"int": ctypes.c_int, "long": ctypes.c_long, "float": ctypes.c_float, "double": ctypes.c_double}


@cache
def _sources() -> str:
    return re.sub(r"//.*", "", "".join(path.read_text() for path in sorted(SOURCES.glob("*.[ch]"))))


@cache
def struct(name: str) -> type[ctypes.Structure]:
    """A struct as the C sources declare it; pointers are addresses. Arrays assigned to other attributes stay alive."""
    (body,) = re.findall(rf"typedef struct \{{([^}}]*)\}} {name};", _sources())
    fields: list[tuple[str, Any]] = []
    for declaration in body.split(";"):
        kind, *names = re.findall(r"[*\w]+", declaration.replace("const ", "")) or [""]
        fields += [(n.lstrip("*"), ctypes.c_void_p if n[0] == "*" else _KINDS.get(kind) or struct(kind)) for n in names]
    return type(name, (ctypes.Structure,), {"_fields_": fields})
