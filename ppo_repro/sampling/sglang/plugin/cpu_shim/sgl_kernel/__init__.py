"""Replace SGLang's compiled CPU kernels, which PyPI does not have, by the functions that text models need.

The hash of the seeded sampler works; any other function raises an error when it is called. `convert_weight_packed` is
missing, so SGLang uses its PyTorch layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from ppo_repro.sampling.draw import murmur_hash32

__version__ = "0+stand-in"
_MASK = 0xFFFFFFFF


def _hash(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Return uint32 [n, V]: MurmurHash3 of the seed's two words, the position and the column."""
    seeds = (seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.long())[:, None]
    words = [seeds & _MASK, (seeds >> 32) & _MASK, positions.long()[:, None] & _MASK, columns.long()[None, :] & _MASK]
    return murmur_hash32(words).to(torch.uint32)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", _hash, "CPU")


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
