"""Tensors as arguments of the C kernels."""

from __future__ import annotations

import torch
from torch import Tensor


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
