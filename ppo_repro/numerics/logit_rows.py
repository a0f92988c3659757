"""Pass rows of logits to the kernels: pointers, the memory of a softmax, and checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppo_repro.base.errors import NumericsError
from ppo_repro.numerics.devices import kernels_of
from ppo_repro.numerics.interface import Struct, ffi

NOT_FINITE = (
    "the model's logits are not finite, or further apart than float32 reaches; "
    "lower the learning rate or check the weights"
)


def require_finite(logits: Tensor) -> None:
    """Raise NumericsError if any logit is infinite or NaN."""
    if not torch.isfinite(logits).all():
        raise NumericsError(NOT_FINITE)


def call(function: str, arguments: Struct, device: torch.device) -> None:
    """Call a kernel. Raises NumericsError if a row of logits is not finite."""
    if not getattr(kernels_of(device), function)(arguments):
        raise NumericsError(NOT_FINITE)


def softmax_rows(n: int, device: torch.device) -> Tensor:
    """Allocate memory for n C structs `Softmax`."""
    return torch.empty(n, ffi.sizeof("Softmax"), dtype=torch.uint8, device=device)


def softmax(rows: Tensor) -> Any:
    """Return the C pointer to memory from `softmax_rows`."""
    return ffi.cast("Softmax *", rows.data_ptr())


def dense(logits: Tensor) -> Tensor:
    """Return logits [n, V] in which each row is contiguous; copy them only if necessary."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def row_pointer(logits: Tensor) -> tuple[Any, int]:
    """Return a pointer to `dense` logits, and the floats from one row to the next."""
    if logits.dtype != torch.float32:
        raise ValueError(f"expected float32 logits, got {logits.dtype}")
    return ffi.cast("float *", logits.data_ptr()), logits.stride(0)


def mask_on(eligible: Tensor | None, device: torch.device) -> Tensor | None:
    """Return the mask [n, V] on the kernels' device, None for None."""
    return None if eligible is None else eligible.to(device).contiguous()


def native_log_softmax(logits: Tensor, temperature: float, eligible: Tensor | None) -> Tensor:
    """Return log p [n, V] by stock torch; minus infinity for tokens that are not eligible."""
    scaled = logits / temperature
    if eligible is not None:
        scaled = scaled.masked_fill(~eligible, float("-inf"))
    return scaled.log_softmax(-1)
