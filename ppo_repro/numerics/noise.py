"""Draw standard normal noise from counted streams."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.numerics.devices import kernels_of
from ppo_repro.numerics.interface import CPU, ffi, pointer


def normal_noise(seeds: Tensor, positions: Tensor, columns: int, device: torch.device = CPU) -> Tensor:
    """Return standard normal noise z = sqrt(-2 ln u) cos(2 pi v). Sampling has other noise.

    u, v = (h + 1/2) / 2^32 with h = hash(1 for u and 2 for v, seed, position, column); |z| < 6.8. Box and Muller, 1958.

    Args:
        seeds: [n] int64.
        positions: [n] int64.

    Returns:
        [n, columns] float64.
    """
    out = torch.empty(len(seeds), columns, dtype=torch.float64, device=device)
    seeds, positions = (x.to(device).contiguous() for x in (seeds, positions))
    noise = ffi.new("Noise *", dict(n=len(seeds), columns=columns))
    noise.seeds, noise.positions, noise.out = (pointer(x, device) for x in (seeds, positions, out))
    kernels_of(device).normal_noise(noise)
    return out
