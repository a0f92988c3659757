"""Linear layers from their definition in `arithmetic.contraction`, with Python's integers."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def exponent(x: float) -> int:
    """Smallest e >= -100 with |x| < 2^e; -100 for 0."""
    return max(-100, math.frexp(x)[1]) if x else -100


def exponents(x: Tensor) -> list[int]:
    """That of the largest number of each row."""
    return [exponent(v) for v in x.abs().amax(-1).tolist()]


def on_grid(x: Tensor, bits: int) -> tuple[np.ndarray, list[int]]:
    """Integers of each row on a grid of its own, without outliers, and the exponents of the grids."""
    e = exponents(x)
    scaled = [np.rint(np.ldexp(row.double().numpy(), bits - k)) for row, k in zip(x, e, strict=True)]
    return np.array([[int(v) for v in row] for row in scaled], dtype=object), e


def _operand(row: list[float], bits: int, gap: int, room: float) -> tuple[list[int], int, list[int]]:
    """Grid integers of a row, 0 for outliers; the exponent of the grid; the columns of outliers."""
    reach = [exponent(float(np.float32(np.float32(v) * np.float32(room)))) for v in row]
    ranked = sorted(reach, reverse=True)
    others = ranked[min(max(4, len(row) // 64), len(row) - 1)]
    e = others if ranked[0] - others >= gap else ranked[0]
    outliers = [k for k, r in enumerate(reach) if r > e]
    # Python rounds ties to even
    integers = [0 if reach[k] > e else round(math.ldexp(v, bits - e)) for k, v in enumerate(row)]
    return integers, e, outliers


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """sum_k x[m, k] w[n, k] [+ bias[n]], inputs on 26 bits and weights on 23, outliers beside them."""
    inputs = [_operand(row, 26, 6, 1.0) for row in x.tolist()]
    weights = [_operand(row, 23, 4, 1.0 + 2.0**-6) for row in w.tolist()]
    y = np.zeros((len(inputs), len(weights)), np.float32)
    for m, (a, a_exponent, a_outliers) in enumerate(inputs):
        for n, (b, b_exponent, b_outliers) in enumerate(weights):
            total = float(sum(i * j for i, j in zip(a, b, strict=True)))  # Python rounds the integer once
            with np.errstate(over="ignore"):  # products of the largest rows leave the range of float32
                y[m, n] = np.float32(math.ldexp(total, a_exponent + b_exponent - 49)) + np.float32(0)
            if bias is not None:
                y[m, n] += np.float32(bias[n])
            beside = 0.0
            for k in [*a_outliers, *[k for k in b_outliers if k not in a_outliers]]:
                beside += float(x[m, k]) * float(w[n, k])
            with np.errstate(over="ignore"):
                y[m, n] = np.float32(float(y[m, n]) + beside)
    return torch.from_numpy(y)
