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


def address(array: Ints | Tensor | None) -> int | None:
    """The address of an array or a contiguous tensor on the CPU; None for NULL."""
    if array is None:
        return None
    if isinstance(array, Tensor):
        if not array.is_contiguous() or array.device.type != "cpu":
            raise ValueError(f"a tensor is on {array.device} with strides {array.stride()}; kernels need it contiguous")
        return array.data_ptr()
    return int(array.ctypes.data)


def at(tensor: Tensor, dtype: torch.dtype = torch.float32) -> int:
    """The address of a contiguous tensor on the CPU; ValueError for another layout, type or device."""
    if tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
        layout = "contiguous" if tensor.is_contiguous() else f"strides {tensor.stride()}"
        raise ValueError(f"{tensor.dtype} on {tensor.device}, {layout}, where a contiguous {dtype} on the CPU is due")
    return tensor.data_ptr()


def at_rows(tensor: Tensor) -> tuple[int, int]:
    """(address, distance in elements) of the rows of a float32 tensor [n, V], each of which is contiguous."""
    if tensor.stride(1) == 1 and tensor.dtype == torch.float32 and tensor.device.type == "cpu":
        return tensor.data_ptr(), tensor.stride(0)
    return at(tensor), tensor.shape[1]


def rows_of(x: Tensor) -> Tensor:
    """A float32 tensor [n, K] as it lies in memory: contiguous, detached."""
    if x.dtype != torch.float32:
        raise ValueError(f"a tensor is {x.dtype}; kernels need float32")
    return x.detach().contiguous()


_KINDS = {"int": ctypes.c_int, "long": ctypes.c_long, "float": ctypes.c_float, "double": ctypes.c_double}


@cache
def _sources() -> str:
    return re.sub(r"//.*", "", "".join(path.read_text() for path in sorted(SOURCES.glob("*.[ch]"))))


def fields(name: str, *inner: type[ctypes.Structure]) -> list[tuple[str, Any]]:
    """The fields of a struct as the C sources declare it; pointers are addresses, `inner` the structs inside it."""
    kinds = _KINDS | {struct.__name__: struct for struct in inner}
    (body,) = re.findall(rf"typedef struct \{{([^}}]*)\}} {name};", _sources())
    found: list[tuple[str, Any]] = []
    for declaration in body.split(";"):
        kind, *names = re.findall(r"[*\w]+", declaration.replace("const ", "")) or [""]
        found += [(n.lstrip("*"), ctypes.c_void_p if n[0] == "*" else kinds[kind]) for n in names]
    return found


class Matrix(ctypes.Structure):
    _fields_ = fields("Matrix")


class NormWeights(ctypes.Structure):
    _fields_ = fields("NormWeights")


class Layer(ctypes.Structure):
    _fields_ = fields("Layer", NormWeights, Matrix)


class Model(ctypes.Structure):
    _fields_ = fields("Model", NormWeights)


class Batch(ctypes.Structure):
    """`alive` keeps the arrays that it points to."""

    batch: Any
    alive: Any

    _fields_ = fields("Batch")
