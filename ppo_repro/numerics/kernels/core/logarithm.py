"""The float64 logarithm of the exact numerics as a scalar function, put into kernels where it is called."""

from __future__ import annotations

import numpy as np

from ppo_repro.numerics.arithmetic.elementwise import LN2
from ppo_repro.numerics.kernels.core.compile import inline

_MANTISSA, _HALF_EXPONENT = (1 << 52) - 1, 1022 << 52
_SQRT_HALF = 0.7071067811865476
# 1 / (2k + 1), highest power first
_A11, _A10, _A9, _A8, _A7, _A6, _A5, _A4, _A3, _A2, _A1, _A0 = (1.0 / (2 * k + 1) for k in range(11, -1, -1))


@inline
def log64(x):  # type: ignore[no-untyped-def]
    """ln(x) of a normal positive float64 as `elementwise.log` defines it."""
    bits = np.float64(x).view(np.int64)
    mantissa = np.int64((bits & _MANTISSA) | _HALF_EXPONENT).view(np.float64)
    e = np.float64((bits >> 52) - 1022)
    if mantissa < _SQRT_HALF:
        mantissa = mantissa * 2.0
        e = e - 1.0
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    y = _A11 * z + _A10
    y = y * z + _A9
    y = y * z + _A8
    y = y * z + _A7
    y = y * z + _A6
    y = y * z + _A5
    y = y * z + _A4
    y = y * z + _A3
    y = y * z + _A2
    y = y * z + _A1
    y = y * z + _A0
    return e * LN2 + (s * 2.0) * y
