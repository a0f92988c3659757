"""A negative control that differs by construction: linear layers whose last digits depend on the number of rows.

Stock torch does that on many processors and shapes, but not on all: a control must not rest on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

STEP = 2.0**-16  # 128 units of the last place: enough to show in a log-prob near log(1/2)


@contextmanager
def row_dependent_linear() -> Iterator[None]:
    """While open, `nn.Linear` gives (x W^T + b) (1 + n 2^-16) for n rows. The layers of exact numerics are others."""
    stock = nn.Linear.forward

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        return stock(self, x) * torch.tensor(1.0 + rows * STEP, dtype=x.dtype)

    nn.Linear.forward = forward
    try:
        yield
    finally:
        nn.Linear.forward = stock
