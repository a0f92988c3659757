"""Elementwise operations of a decoder layer, each in one pass: rotary positions, gated SiLU, addition.

Every operation is rounded to float32 as the modules round it.
"""

from __future__ import annotations

import numpy as np

from ppo_repro.numerics.kernels.core.compile import inline, kernel
from ppo_repro.numerics.kernels.core.pool import in_parts
from ppo_repro.numerics.kernels.core.scalar import exp32

# How a layer ended: well, or at what was not finite, where a linear layer stands for its input, since its weight was
# checked before; or, where their products are not computed, at an input of a linear layer that has outliers.
FINITE, BEFORE_ATTENTION, QUERY, QUERY_NORM, KEY_NORM, ATTENTION, OUT, BEFORE_MLP, GATE, DOWN, OUTLIERS = range(11)

_ONE = np.float32(1.0)


@inline
def _turn(a, b, c1, c2, s1, s2):  # type: ignore[no-untyped-def]
    """A pair of numbers rotated; the operations of x cos + rotate_half(x) sin."""
    return a * c1 + -b * s1, b * c2 + a * s2


@inline
def _turn_back(a, b, c1, c2, s1, s2):  # type: ignore[no-untyped-def]
    """The gradient of a pair from that of the rotated pair."""
    return a * c1 + b * s2, b * c2 + -(a * s1)


@inline
def _rotate(turn, x, cosine, sine, positions, heads, dim, first, last):  # type: ignore[no-untyped-def]
    """Apply `turn` in place to rows first..last-1 of flat x [R, heads, dim]."""
    half = dim // 2
    for r in range(first, last):
        at = positions[r] * dim
        c1, c2 = cosine[at : at + half], cosine[at + half : at + dim]
        s1, s2 = sine[at : at + half], sine[at + half : at + dim]
        for h in range(heads):
            begin = (r * heads + h) * dim
            x1, x2 = x[begin : begin + half], x[begin + half : begin + dim]
            for d in range(half):
                x1[d], x2[d] = turn(x1[d], x2[d], c1[d], c2[d], s1[d], s2[d])


@kernel
def rotate_rows(x, cosine, sine, positions, heads, dim, first, last):  # type: ignore[no-untyped-def]
    _rotate(_turn, x, cosine, sine, positions, heads, dim, first, last)


@kernel
def rotate_rows_back(x, cosine, sine, positions, heads, dim, first, last):  # type: ignore[no-untyped-def]
    _rotate(_turn_back, x, cosine, sine, positions, heads, dim, first, last)


def rotate(
    x: np.ndarray, cosine: np.ndarray, sine: np.ndarray, positions: np.ndarray, dim: int, back: bool = False
) -> None:
    """x = x cos + rotate_half(x) sin in place; with `back`, x is the gradient of the result and becomes that of x.

    x [R, heads D] float32, tables cosine and sine [P, D], positions [R] int64 below P.
    """
    heads, flat, c, s = x.shape[1] // dim, x.reshape(-1), cosine.reshape(-1), sine.reshape(-1)
    work = rotate_rows_back if back else rotate_rows
    in_parts(lambda i, j: work(flat, c, s, positions, heads, dim, i, j), len(x), 0.5 * x.shape[1])


# Loops count from 0 over slices. If a loop began at another number, the compiler would have to allow for negative
# indices; neighbouring arrays might then overlap, and it would not vectorise the loop.


@kernel
def silu_times_flat(gate, up, y):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        y[i] = gate[i] / (exp32(-gate[i]) + _ONE) * up[i]


def silu_times(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """silu(gate) up, float32, contiguous. In place the loop would not be vectorised and take 3.6 times as long."""
    y = np.empty_like(gate)
    g, u, flat = gate.reshape(-1), up.reshape(-1), y.reshape(-1)
    in_parts(lambda i, j: silu_times_flat(g[i:j], u[i:j], flat[i:j]), y.size, 1.0)
    return y


@kernel
def silu_times_backward_flat(grad, gate, up, d_gate, d_up):  # type: ignore[no-untyped-def]
    for i in range(grad.size):
        x, g = gate[i], grad[i]
        total = exp32(-x) + _ONE
        s = _ONE / total
        d_up[i] = g * (x / total)
        d_gate[i] = g * up[i] * (((_ONE - s) * x + _ONE) * s)


def silu_times_backward(grad: np.ndarray, gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of gate and up from that of silu(gate) up; float32, contiguous, of the same shape."""
    d_gate, d_up = np.empty_like(gate), np.empty_like(gate)
    arrays = [x.reshape(-1) for x in (grad, gate, up, d_gate, d_up)]
    in_parts(lambda i, j: silu_times_backward_flat(*[x[i:j] for x in arrays]), gate.size, 1.7)
    return d_gate, d_up


@kernel
def add_flat(a, b, y):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        y[i] = a[i] + b[i]


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b, float32, contiguous, of the same shape."""
    y = np.empty_like(a)
    arrays = [x.reshape(-1) for x in (a, b, y)]
    in_parts(lambda i, j: add_flat(*[x[i:j] for x in arrays]), a.size, 0.3)
    return y
