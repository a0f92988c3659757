"""Replace SGLang's compiled CPU kernels, which PyPI does not have, by the functions that text models need.

The hash of the seeded sampler works; any other function raises an error when it is called. `convert_weight_packed` is
missing, so SGLang uses its PyTorch layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

__version__ = "0+stand-in"


def murmur_hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Return uint32 [n, V]: MurmurHash3 x86 of the seed's two words, the position and the column. Appleby, 2011."""
    seeds = seed.numpy().astype(np.int64)[:, None]
    words = seeds, seeds >> 32, positions.numpy()[:, None], columns.numpy()[None, :]
    h: np.ndarray = np.zeros((1, 1), np.uint32)  # whose products wrap
    for word in words:
        h = _rotated(h ^ _rotated(word.astype(np.uint32) * 0xCC9E2D51, 15) * 0x1B873593, 13) * 5 + 0xE6546B64
    h = h ^ 4 * len(words)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> shift) * factor
    return torch.from_numpy(h ^ h >> 16)


def _rotated(x: np.ndarray, bits: int) -> np.ndarray:
    return x << bits | x >> 32 - bits


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")


def assign_req_to_token_pool_cpu(
    requests: Tensor, table: Tensor, starts: Tensor, ends: Tensor, locations: Tensor, width: int
) -> None:
    """Write `locations` [N] into the table: the next ends[r] - starts[r] of them go to row requests[r]."""
    lengths = (ends - starts).tolist()
    for request, start, part in zip(requests.tolist(), starts.tolist(), locations.split(lengths), strict=True):
        table[request, start : start + len(part)] = part.to(table.dtype)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Return a function that SGLang imports and never calls; dunder attributes stay missing."""
    if name.startswith("__") or name == "convert_weight_packed":
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not there: this is the stand-in for CPUs")

    return missing
