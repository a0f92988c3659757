"""Arrays that start at a cache line.

Loading a vector or a row of a tile that lies across two lines takes two accesses: AMX products of operands in L1 took
2.9 times as long when the operands were shifted by 16 bytes.
"""

from __future__ import annotations

import numpy as np
import torch

from ppo_repro.numerics.kernels.core.compile import inline

LINE = 64  # bytes


def empty_bytes(count: int) -> np.ndarray:
    """int8 [count], not initialised, at an address that is a multiple of LINE."""
    return torch.empty(count, dtype=torch.int8).numpy()  # NumPy aligns to 16, torch's allocator to 64


def zero_bytes(count: int) -> np.ndarray:
    """int8 [count] of zeros at an address that is a multiple of LINE."""
    return torch.zeros(count, dtype=torch.int8).numpy()


@inline
def align_to_line(array):  # type: ignore[no-untyped-def]
    """A flat array from its first element at a line on, for use in kernels; allocate LINE bytes more than needed."""
    return array[(-array.ctypes.data % 64) // array.itemsize :]
