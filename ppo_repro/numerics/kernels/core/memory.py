"""Arrays that begin where a cache line does.

A vector or a row of a tile that lies across two lines takes two accesses: AMX products of operands in L1 took 2.9
times as long with operands 16 bytes further on.
"""

from __future__ import annotations

import numpy as np
import torch

from ppo_repro.numerics.kernels.core.compile import inline

LINE = 64


def empty_bytes(count: int) -> np.ndarray:
    """int8 [count] of any value, the first at a multiple of LINE."""
    return torch.empty(count, dtype=torch.int8).numpy()  # NumPy aligns to 16, torch's allocator to 64


def zero_bytes(count: int) -> np.ndarray:
    """int8 [count] of zeros, the first at a multiple of LINE."""
    return torch.zeros(count, dtype=torch.int8).numpy()


@inline
def from_line(raw):  # type: ignore[no-untyped-def]
    """A flat array from its first element at a line on: make it LINE bytes longer than needed (in kernels)."""
    return raw[(-raw.ctypes.data % 64) // raw.itemsize :]
