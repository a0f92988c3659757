"""SiLU and its derivative by the elementwise law."""

from __future__ import annotations

import numpy as np

from ppo_repro.kernels.compile import kernel
from ppo_repro.kernels.pool import in_parts
from ppo_repro.kernels.scalar import exp32

_ONE = np.float32(1.0)


@kernel
def _silu(x, first, last, y):  # type: ignore[no-untyped-def]
    for i in range(first, last):
        y[i] = x[i] / (exp32(-x[i]) + _ONE)


def silu(x: np.ndarray, y: np.ndarray) -> None:
    """y = x / (1 + exp(-x)); flat float32."""
    in_parts(lambda i, j: _silu(x, i, j, y), x.size, 1.0)


@kernel
def _silu_backward(grad, x, first, last, dx):  # type: ignore[no-untyped-def]
    for i in range(first, last):
        s = _ONE / (exp32(-x[i]) + _ONE)
        dx[i] = grad[i] * (((_ONE - s) * x[i] + _ONE) * s)


def silu_backward(grad: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """dx = grad s (1 + x (1 - s)), s = 1 / (1 + exp(-x)); flat float32."""
    in_parts(lambda i, j: _silu_backward(grad, x, i, j, dx), x.size, 1.5)
