"""Elementwise parts of a decoder layer in one pass each; every operation is rounded as the modules round it."""

from __future__ import annotations

import numpy as np

from ppo_repro.kernels.compile import kernel
from ppo_repro.kernels.pool import in_parts
from ppo_repro.kernels.scalar import exp32

_ONE = np.float32(1.0)


@kernel
def _rotate(x, cosine, sine, positions, heads, dim, first, last):  # type: ignore[no-untyped-def]
    half = dim // 2
    for r in range(first, last):
        at = positions[r] * dim
        for h in range(heads):
            row = x[(r * heads + h) * dim : (r * heads + h) * dim + dim]
            for d in range(half):
                a, b = row[d], row[d + half]
                row[d] = a * cosine[at + d] + -b * sine[at + d]
                row[d + half] = b * cosine[at + half + d] + a * sine[at + half + d]


def rotate(x: np.ndarray, cosine: np.ndarray, sine: np.ndarray, positions: np.ndarray, dim: int) -> None:
    """x = x cos + rotate_half(x) sin in place; x [R, heads D] float32, tables [P, D], positions [R] int64."""
    heads, flat, c, s = x.shape[1] // dim, x.reshape(-1), cosine.reshape(-1), sine.reshape(-1)
    in_parts(lambda i, j: _rotate(flat, c, s, positions, heads, dim, i, j), len(x), 0.5 * x.shape[1])


@kernel
def _silu_times(gate, up, first, last, y):  # type: ignore[no-untyped-def]
    for i in range(first, last):
        y[i] = gate[i] / (exp32(-gate[i]) + _ONE) * up[i]


def silu_times(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """silu(gate) up, float32; contiguous. In place it would not be vectorised: 3.6 times the time."""
    y = np.empty_like(gate)
    flat = gate.reshape(-1), up.reshape(-1)
    in_parts(lambda i, j: _silu_times(*flat, i, j, y.reshape(-1)), gate.size, 1.0)
    return y
