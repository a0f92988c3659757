"""Gaussian error linear units with their derivatives, by the elementwise law as `numerics.gates` states it."""

from __future__ import annotations

import numpy as np

from ppo_repro.numerics.arithmetic.gates import (
    CUBIC,
    DENSITY_AT_0,
    LAST_TAIL,
    LIMIT,
    MILLS_COEFFICIENTS,
    QUICK_SLOPE,
    TANH_SLOPE,
)
from ppo_repro.numerics.kernels.core.compile import inline, kernel
from ppo_repro.numerics.kernels.core.pool import in_parts
from ppo_repro.numerics.kernels.core.scalar import exp64

_M16, _M15, _M14, _M13, _M12, _M11, _M10, _M9, _M8, _M7, _M6, _M5, _M4, _M3, _M2, _M1, _M0 = MILLS_COEFFICIENTS
_THREE_CUBIC = 3.0 * CUBIC


@inline
def _normal_cdf(x):  # type: ignore[no-untyped-def]
    """Phi(x) and phi(x)."""
    a = np.abs(x)
    a = LAST_TAIL if a > LAST_TAIL else a
    density = exp64(a * a * -0.5) * DENSITY_AT_0
    above = a + 4.0
    s = (a - 4.0) / above
    y = _M16 * s + _M15
    y = y * s + _M14
    y = y * s + _M13
    y = y * s + _M12
    y = y * s + _M11
    y = y * s + _M10
    y = y * s + _M9
    y = y * s + _M8
    y = y * s + _M7
    y = y * s + _M6
    y = y * s + _M5
    y = y * s + _M4
    y = y * s + _M3
    y = y * s + _M2
    y = y * s + _M1
    y = y * s + _M0
    tail = density * (y / above)
    return (tail if x < 0.0 else 1.0 - tail), density


@inline
def _tanh_gate(x):  # type: ignore[no-untyped-def]
    """logistic(2 sqrt(2 / pi) (x + 0.044715 x^3)) and its derivative."""
    square = x * x
    e = exp64(-((x * square * CUBIC + x) * TANH_SLOPE))
    s = 1.0 / (e + 1.0)
    return s, e * s * s * ((square * _THREE_CUBIC + 1.0) * TANH_SLOPE)


@inline
def _quick_gate(x):  # type: ignore[no-untyped-def]
    """logistic(1.702 x) and its derivative."""
    e = exp64(-(x * QUICK_SLOPE))
    s = 1.0 / (e + 1.0)
    return s, e * s * s * QUICK_SLOPE


@inline
def _from_below(x):  # type: ignore[no-untyped-def]
    """A float32 as float64, -512 where it is less; NaN stays NaN."""
    x = np.float64(x)
    return -LIMIT if x < -LIMIT else x


@inline
def _from_above(x):  # type: ignore[no-untyped-def]
    return LIMIT if x > LIMIT else x


@kernel
def _gelu(x, y):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        wide = _from_below(x[i])
        g, _ = _normal_cdf(_from_above(wide))
        y[i] = np.float32(wide * g)


def gelu(x: np.ndarray, y: np.ndarray) -> None:
    """y = x Phi(x); flat float32."""
    in_parts(lambda i, j: _gelu(x[i:j], y[i:j]), x.size, 3.3)


@kernel
def _gelu_backward(grad, x, dx):  # type: ignore[no-untyped-def]
    for i in range(dx.size):
        wide = _from_above(_from_below(x[i]))
        g, slope = _normal_cdf(wide)
        dx[i] = np.float32((slope * wide + g) * np.float64(grad[i]))


def gelu_backward(grad: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """dx = grad (g + x g'), the derivative of `gelu` = x g(x); flat float32."""
    in_parts(lambda i, j: _gelu_backward(grad[i:j], x[i:j], dx[i:j]), x.size, 3.7)


@kernel
def _gelu_tanh(x, y):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        wide = _from_below(x[i])
        g, _ = _tanh_gate(_from_above(wide))
        y[i] = np.float32(wide * g)


def gelu_tanh(x: np.ndarray, y: np.ndarray) -> None:
    """y = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2; flat float32."""
    in_parts(lambda i, j: _gelu_tanh(x[i:j], y[i:j]), x.size, 2.2)


@kernel
def _gelu_tanh_backward(grad, x, dx):  # type: ignore[no-untyped-def]
    for i in range(dx.size):
        wide = _from_above(_from_below(x[i]))
        g, slope = _tanh_gate(wide)
        dx[i] = np.float32((slope * wide + g) * np.float64(grad[i]))


def gelu_tanh_backward(grad: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """dx = grad (g + x g'), the derivative of `gelu_tanh` = x g(x); flat float32."""
    in_parts(lambda i, j: _gelu_tanh_backward(grad[i:j], x[i:j], dx[i:j]), x.size, 2.5)


@kernel
def _quick_gelu(x, y):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        wide = _from_below(x[i])
        g, _ = _quick_gate(_from_above(wide))
        y[i] = np.float32(wide * g)


def quick_gelu(x: np.ndarray, y: np.ndarray) -> None:
    """y = x logistic(1.702 x); flat float32."""
    in_parts(lambda i, j: _quick_gelu(x[i:j], y[i:j]), x.size, 2.2)


@kernel
def _quick_gelu_backward(grad, x, dx):  # type: ignore[no-untyped-def]
    for i in range(dx.size):
        wide = _from_above(_from_below(x[i]))
        g, slope = _quick_gate(wide)
        dx[i] = np.float32((slope * wide + g) * np.float64(grad[i]))


def quick_gelu_backward(grad: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """dx = grad (g + x g'), the derivative of `quick_gelu` = x g(x); flat float32."""
    in_parts(lambda i, j: _quick_gelu_backward(grad[i:j], x[i:j], dx[i:j]), x.size, 2.5)
