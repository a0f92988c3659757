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


@kernel
def _rotate_back(x, cosine, sine, positions, heads, dim, first, last):  # type: ignore[no-untyped-def]
    half = dim // 2
    for r in range(first, last):
        at = positions[r] * dim
        for h in range(heads):
            row = x[(r * heads + h) * dim : (r * heads + h) * dim + dim]
            for d in range(half):
                a, b = row[d], row[d + half]
                row[d] = a * cosine[at + d] + b * sine[at + half + d]
                row[d + half] = b * cosine[at + half + d] + -(a * sine[at + d])


def rotate(
    x: np.ndarray, cosine: np.ndarray, sine: np.ndarray, positions: np.ndarray, dim: int, back: bool = False
) -> None:
    """x = x cos + rotate_half(x) sin in place, or `back` the gradient of x given that of the result.

    x [R, heads D] float32, tables [P, D], positions [R] int64 below P.
    """
    heads, flat, c, s = x.shape[1] // dim, x.reshape(-1), cosine.reshape(-1), sine.reshape(-1)
    work = _rotate_back if back else _rotate
    in_parts(lambda i, j: work(flat, c, s, positions, heads, dim, i, j), len(x), 0.5 * x.shape[1])


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


@kernel
def _silu_times_backward(grad, gate, up, first, last, d_gate, d_up):  # type: ignore[no-untyped-def]
    for i in range(first, last):
        x, g = gate[i], grad[i]
        total = exp32(-x) + _ONE
        s = _ONE / total
        d_up[i] = g * (x / total)
        d_gate[i] = g * up[i] * (((_ONE - s) * x + _ONE) * s)


def silu_times_backward(grad: np.ndarray, gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of gate and up given that of silu(gate) up, float32; contiguous, of one shape."""
    d_gate, d_up = np.empty_like(gate), np.empty_like(gate)
    flat = grad.reshape(-1), gate.reshape(-1), up.reshape(-1)
    in_parts(lambda i, j: _silu_times_backward(*flat, i, j, d_gate.reshape(-1), d_up.reshape(-1)), gate.size, 2.0)
    return d_gate, d_up


@kernel
def _add(a, b, first, last, y):  # type: ignore[no-untyped-def]
    for i in range(first, last):
        y[i] = a[i] + b[i]


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b, float32; contiguous, of one shape."""
    y = np.empty_like(a)
    in_parts(lambda i, j: _add(a.reshape(-1), b.reshape(-1), i, j, y.reshape(-1)), a.size, 0.25)
    return y
