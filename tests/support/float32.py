"""Float32 values for property tests, and their bits."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

TINIEST, SMALLEST_NORMAL, LARGEST = 2.0**-149, 2.0**-126, (2.0 - 2.0**-23) * 2.0**127


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def bits(x: Tensor) -> list[int]:
    """The bit patterns: unlike `==` they tell -0.0 from 0.0, and equal NaNs are equal."""
    return x.detach().contiguous().view({4: torch.int32, 8: torch.int64}[x.element_size()]).reshape(-1).tolist()


def finite(low: float = -LARGEST, high: float = LARGEST) -> st.SearchStrategy[float]:
    """Float32 numbers in [low, high], denormals and both zeros included."""
    low, high = float(tensor([low])), float(tensor([high]))
    return st.floats(low, high, width=32, allow_nan=False)


def lists(low: float = -LARGEST, high: float = LARGEST, size: int = 40) -> st.SearchStrategy[list[float]]:
    return st.lists(finite(low, high), min_size=1, max_size=size)


def pairs_of_categoricals(size: int = 6) -> st.SearchStrategy[tuple[list[float], list[float]]]:
    """Two distributions over the same outcomes."""
    rows = st.lists(st.tuples(st.integers(1, 100), st.integers(1, 100)), min_size=2, max_size=size)

    def normalise(rows: list[tuple[int, int]]) -> tuple[list[float], list[float]]:
        return [a / sum(r[0] for r in rows) for a, _ in rows], [b / sum(r[1] for r in rows) for _, b in rows]

    return rows.map(normalise)
