"""Tensors and arrays as the C kernels take them: pointers to contiguous memory, and the structs of kernels.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

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


class MatrixStruct(ctypes.Structure):
    """`Matrix` of kernels.h."""

    _fields_ = (
        ("w", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("panels", ctypes.c_void_p),
        ("grad", ctypes.c_long),
        ("bias_grad", ctypes.c_long),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
        ("transposed", ctypes.c_int),
        ("unused", ctypes.c_int),
    )


class NormStruct(ctypes.Structure):
    """`NormWeights` of kernels.h."""

    _fields_ = (("w", ctypes.c_void_p), ("b", ctypes.c_void_p), ("grad", ctypes.c_long), ("b_grad", ctypes.c_long))


class LayerStruct(ctypes.Structure):
    """`Layer` of kernels.h."""

    _fields_ = (
        *((name, NormStruct) for name in ("norm1", "norm2", "q_norm", "k_norm")),
        *((name, MatrixStruct) for name in ("qkv", "out", "up", "down", "router")),
        ("expert_up", ctypes.POINTER(MatrixStruct)),
        ("expert_down", ctypes.POINTER(MatrixStruct)),
        ("window", ctypes.c_int),
        ("scale", ctypes.c_float),
    )


class ModelStruct(ctypes.Structure):
    """`Model` of kernels.h."""

    _fields_ = (
        *(
            (name, ctypes.c_int)
            for name in (
                *("layers", "hidden", "heads", "kv_heads", "head_dim", "vocabulary"),
                *("norm", "qk_norm", "rotary", "activation", "gated", "parallel"),
                *("experts", "chosen", "normalised", "mixtures"),
                *("q_at", "q_step", "k_at", "k_step", "v_at", "v_step"),
                *("round_activations", "round_inputs", "round_cache"),
                *("position_entries", "padding"),
            )
        ),
        *((name, ctypes.c_float) for name in ("eps", "embedding_scale")),
        *((name, ctypes.c_void_p) for name in ("cosine", "sine", "embedding", "positions")),
        *((name, ctypes.c_long) for name in ("embedding_grad", "positions_grad")),
        ("last_norm", NormStruct),
        ("layer", ctypes.POINTER(LayerStruct)),
    )


class BatchStruct(ctypes.Structure):
    """`Batch` of kernels.h."""

    batch: Any
    alive: Any

    _fields_ = (
        *((name, ctypes.c_int) for name in ("tokens", "sequences")),
        *((name, ctypes.c_void_p) for name in ("ids", "position", "sequence", "start", "base", "slots")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        ("capacity", ctypes.c_long),
        ("routes", ctypes.c_void_p),
        ("seen", ctypes.c_void_p),
    )
