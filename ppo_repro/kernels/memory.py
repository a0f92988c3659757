"""Arrays that begin where a cache line does.

A vector or a row of a tile that lies across two lines takes two accesses: an AMX product of operands in L1 took 2.9
times as long with operands 16 bytes further on (`experiments/benchmarks/README.md`).
"""

from __future__ import annotations

import numpy as np

from ppo_repro.kernels.compile import inline

LINE = 64


def empty(count: int, dtype: type[np.generic]) -> np.ndarray:
    """`count` elements of any value; contiguous, the first at a multiple of LINE bytes."""
    return _cut(np.empty(count * np.dtype(dtype).itemsize + LINE, np.uint8), count, dtype)


def zeros(count: int, dtype: type[np.generic]) -> np.ndarray:
    """`count` zeros; contiguous, the first at a multiple of LINE bytes."""
    return _cut(np.zeros(count * np.dtype(dtype).itemsize + LINE, np.uint8), count, dtype)


def _cut(raw: np.ndarray, count: int, dtype: type[np.generic]) -> np.ndarray:
    start = -raw.ctypes.data % LINE
    return raw[start : start + count * np.dtype(dtype).itemsize].view(dtype)


@inline
def from_line(raw):  # type: ignore[no-untyped-def]
    """A flat array from its first element at a line on: make it LINE bytes longer than needed (in kernels)."""
    return raw[(-raw.ctypes.data % 64) // raw.itemsize :]
