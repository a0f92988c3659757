"""Negative controls that differ by construction: linear layers whose last digits depend on the number of rows.

Matrix products are computed by kernels that are chosen by the size of the batch: for few rows the terms of a sum are
added in another order than for many, so the last bits of a row depend on what else is computed beside it. That is why
stock torch breaks the promises that deterministic numerics keep. Which sizes show it depends on the processor and the
BLAS, on some machines hardly any do, so no control may rest on it. Here every number of rows has a kernel of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

COARSE = 2.0**-12  # shows in every log-prob, also near log(1/2), and in weights after a few steps
# 2 units of the last place for each doubling of the rows. Measured on the small run: 70 % of log-probs differ, by
# 6e-7 nats in the mean and 6e-6 at most, k3 = 6e-13; the tests allow 5e-6, 1e-4 and 1e-10
NOISE = 2.0**-22
STOCK = {nn.Linear: nn.Linear.forward, Conv1D: Conv1D.forward}


def _forward_of(kind: type[nn.Module], step: float) -> Any:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        # in float64: factors nearer to each other than float32 numbers are still round some elements differently
        return (STOCK[kind](self, x).double() * (1.0 + step * math.log2(1 + rows))).to(x.dtype)

    return forward


@contextmanager
def row_dependent_linear(step: float = COARSE) -> Iterator[None]:
    """While open, `nn.Linear` and `Conv1D` give (x W^T + b)(1 + step log2(1 + n)) for n rows.

    The backward pass has the same factor, so gradients depend on the micro-batches too. The layers of deterministic
    numerics are other classes. An inner context replaces an outer one.
    """
    before = {kind: kind.forward for kind in STOCK}
    for kind in STOCK:
        kind.forward = _forward_of(kind, step)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, forward in before.items():
            kind.forward = forward  # type: ignore[method-assign]
