"""SiLU with its derivative and tanh, by the elementwise law."""

from __future__ import annotations

import numpy as np

from ppo_repro.numerics.kernels.core.compile import kernel
from ppo_repro.numerics.kernels.core.pool import in_parts
from ppo_repro.numerics.kernels.core.scalar import exp32, exp64

_ONE = np.float32(1.0)


@kernel
def _silu(x, y):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        y[i] = x[i] / (exp32(-x[i]) + _ONE)


def silu(x: np.ndarray, y: np.ndarray) -> None:
    """y = x / (1 + exp(-x)); flat float32."""
    in_parts(lambda i, j: _silu(x[i:j], y[i:j]), x.size, 1.0)


@kernel
def _silu_backward(grad, x, dx):  # type: ignore[no-untyped-def]
    for i in range(dx.size):
        s = _ONE / (exp32(-x[i]) + _ONE)
        dx[i] = grad[i] * (((_ONE - s) * x[i] + _ONE) * s)


def silu_backward(grad: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """dx = grad s (1 + x (1 - s)), s = 1 / (1 + exp(-x)); flat float32."""
    in_parts(lambda i, j: _silu_backward(grad[i:j], x[i:j], dx[i:j]), x.size, 1.5)


@kernel
def _tanh(x, series, most, y):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        a = np.abs(np.float64(x[i]))
        a = most if a > most else a
        e = exp64(a * -2.0)
        large = (1.0 - e) / (1.0 + e)
        small = a - a * a * a * (1.0 / 3.0)
        y[i] = np.copysign(np.float32(small if a < series else large), x[i])


def tanh(x: np.ndarray, series: float, most: float, y: np.ndarray) -> None:
    """y = tanh(x), |x| up to `most`, as x - x^3 / 3 below `series`; flat float32."""
    in_parts(lambda i, j: _tanh(x[i:j], series, most, y[i:j]), x.size, 3.0)
