"""Activation functions with their derivatives: SiLU and tanh, and Gaussian error linear units y = x g(x).

Each operation is rounded as in the eager code: SiLU in float32, the others in float64 and once to float32. The gates g
are those of `arithmetic.gates`.
"""

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
from ppo_repro.numerics.kernels.core.scalar import exp32, exp64

_ONE = np.float32(1.0)
_M16, _M15, _M14, _M13, _M12, _M11, _M10, _M9, _M8, _M7, _M6, _M5, _M4, _M3, _M2, _M1, _M0 = MILLS_COEFFICIENTS
_THREE_CUBIC = 3.0 * CUBIC


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
def _tanh(x, series_end, limit, y):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        a = np.abs(np.float64(x[i]))
        a = limit if a > limit else a
        e = exp64(a * -2.0)
        large = (1.0 - e) / (1.0 + e)
        small = a - a * a * a * (1.0 / 3.0)
        y[i] = np.copysign(np.float32(small if a < series_end else large), x[i])


def tanh(x: np.ndarray, series_end: float, limit: float, y: np.ndarray) -> None:
    """y = tanh(x), |x| clamped to `limit`; x - x^3 / 3 where |x| < `series_end`; flat float32."""
    in_parts(lambda i, j: _tanh(x[i:j], series_end, limit, y[i:j]), x.size, 3.0)


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
def _apply_gate(gate, x, y):  # type: ignore[no-untyped-def]
    """y = x g(x), the argument of g clamped to [-LIMIT, LIMIT] and the factor x to at least -LIMIT; NaN stays NaN."""
    for i in range(y.size):
        wide = np.float64(x[i])
        wide = -LIMIT if wide < -LIMIT else wide
        g, _ = gate(LIMIT if wide > LIMIT else wide)
        y[i] = np.float32(wide * g)


@inline
def _apply_gate_backward(gate, grad, x, dx):  # type: ignore[no-untyped-def]
    """dx = grad (g + x g'), x clamped to [-LIMIT, LIMIT]; NaN stays NaN."""
    for i in range(dx.size):
        wide = np.float64(x[i])
        wide = -LIMIT if wide < -LIMIT else wide
        wide = LIMIT if wide > LIMIT else wide
        g, slope = gate(wide)
        dx[i] = np.float32((slope * wide + g) * np.float64(grad[i]))


@kernel
def _gelu(x, y):  # type: ignore[no-untyped-def]
    _apply_gate(_normal_cdf, x, y)


def gelu(x: np.ndarray, y: np.ndarray) -> None:
    """y = x Phi(x); flat float32."""
    in_parts(lambda i, j: _gelu(x[i:j], y[i:j]), x.size, 3.3)


@kernel
def _gelu_backward(grad, x, dx):  # type: ignore[no-untyped-def]
    _apply_gate_backward(_normal_cdf, grad, x, dx)


def gelu_backward(grad: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """dx = grad (g + x g'), the derivative of `gelu` = x g(x); flat float32."""
    in_parts(lambda i, j: _gelu_backward(grad[i:j], x[i:j], dx[i:j]), x.size, 3.7)


@kernel
def _gelu_tanh(x, y):  # type: ignore[no-untyped-def]
    _apply_gate(_tanh_gate, x, y)


def gelu_tanh(x: np.ndarray, y: np.ndarray) -> None:
    """y = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2; flat float32."""
    in_parts(lambda i, j: _gelu_tanh(x[i:j], y[i:j]), x.size, 2.2)


@kernel
def _gelu_tanh_backward(grad, x, dx):  # type: ignore[no-untyped-def]
    _apply_gate_backward(_tanh_gate, grad, x, dx)


def gelu_tanh_backward(grad: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """dx = grad (g + x g'), the derivative of `gelu_tanh` = x g(x); flat float32."""
    in_parts(lambda i, j: _gelu_tanh_backward(grad[i:j], x[i:j], dx[i:j]), x.size, 2.5)


@kernel
def _quick_gelu(x, y):  # type: ignore[no-untyped-def]
    _apply_gate(_quick_gate, x, y)


def quick_gelu(x: np.ndarray, y: np.ndarray) -> None:
    """y = x logistic(1.702 x); flat float32."""
    in_parts(lambda i, j: _quick_gelu(x[i:j], y[i:j]), x.size, 2.2)


@kernel
def _quick_gelu_backward(grad, x, dx):  # type: ignore[no-untyped-def]
    _apply_gate_backward(_quick_gate, grad, x, dx)


def quick_gelu_backward(grad: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """dx = grad (g + x g'), the derivative of `quick_gelu` = x g(x); flat float32."""
    in_parts(lambda i, j: _quick_gelu_backward(grad[i:j], x[i:j], dx[i:j]), x.size, 2.5)
