"""Scalar functions of the exact numerics, inlined into the kernels that call them.

They are compiled with the floating-point flags of their caller. Use `exp32`, `exp64` and `log64` in a `kernel`, never
in an `exact_sum`, where their operations would be contracted into fused multiply-adds.
"""

from __future__ import annotations

import numpy as np

from ppo_repro.numerics.arithmetic.elementwise import (
    EXP64_COEFFICIENTS,
    EXP64_LN2_HIGH,
    EXP64_LN2_LOW,
    EXP64_MAX,
    EXP64_MIN,
    EXP_COEFFICIENTS,
    EXP_MAX,
    EXP_MIN,
    LN2,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
)
from ppo_repro.numerics.arithmetic.grid import MIN_EXPONENT
from ppo_repro.numerics.kernels.core.compile import inline

# bits of a magnitude order like the magnitude; those of NaN are above those of infinity
MAGNITUDE32, INFINITY_BITS = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
MAGNITUDE64, INFINITY_BITS_64 = np.int64(0x7FFFFFFFFFFFFFFF), np.int64(0x7FF << 52)

_LOG2_E = np.float32(LOG2_E)
_LN2_HIGH, _LN2_LOW = np.float32(LN2_HIGH), np.float32(LN2_LOW)
_MIN, _MAX = np.float32(EXP_MIN), np.float32(EXP_MAX)
_C0, _C1, _C2, _C3, _C4, _C5 = (np.float32(c) for c in EXP_COEFFICIENTS)
_D14, _D13, _D12, _D11, _D10, _D9, _D8, _D7, _D6, _D5, _D4, _D3, _D2, _D1, _D0 = EXP64_COEFFICIENTS
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
_MANTISSA, _HALF_EXPONENT = (1 << 52) - 1, 1022 << 52
_SQRT_HALF = 0.7071067811865476
# 1 / (2k + 1), highest power first
_A11, _A10, _A9, _A8, _A7, _A6, _A5, _A4, _A3, _A2, _A1, _A0 = (1.0 / (2 * k + 1) for k in range(11, -1, -1))


@inline
def pow2_32(exponent):  # type: ignore[no-untyped-def]
    """2^exponent as float32, exactly; integer exponent in [-126, 127]."""
    return np.int32((np.int32(exponent) + 127) << 23).view(np.float32)


@inline
def pow2_64(exponent):  # type: ignore[no-untyped-def]
    """2^exponent as float64, exactly; integer exponent in [-1022, 1023]."""
    return np.int64((np.int64(exponent) + 1023) << 52).view(np.float64)


@inline
def exp32(x):  # type: ignore[no-untyped-def]
    """e^x of a float32 as `elementwise.exp` defines it; NaN stays NaN."""
    x = _MIN if x < _MIN else x
    x = _MAX if x > _MAX else x
    k = np.rint(x * _LOG2_E)
    r = x - k * _LN2_HIGH
    r = r - k * _LN2_LOW
    y = r * _C0
    y = (y + _C1) * r
    y = (y + _C2) * r
    y = (y + _C3) * r
    y = (y + _C4) * r
    y = (y + _C5) * r
    y = y * r
    y = y + r
    y = y + _ONE
    return y * pow2_32(k)


@inline
def exp64(x):  # type: ignore[no-untyped-def]
    """e^x of a float64 as `elementwise.exp64` defines it; NaN stays NaN."""
    x = EXP64_MIN if x < EXP64_MIN else x
    x = EXP64_MAX if x > EXP64_MAX else x
    k = np.rint(x * LOG2_E)
    r = x - k * EXP64_LN2_HIGH
    r = r - k * EXP64_LN2_LOW
    y = _D14 * r + _D13
    y = y * r + _D12
    y = y * r + _D11
    y = y * r + _D10
    y = y * r + _D9
    y = y * r + _D8
    y = y * r + _D7
    y = y * r + _D6
    y = y * r + _D5
    y = y * r + _D4
    y = y * r + _D3
    y = y * r + _D2
    y = y * r + _D1
    y = y * r + _D0
    # through 32 bits: AVX2 has no conversion to 64
    return y * pow2_64(np.int32(k))


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


@inline
def exponent32(bits):  # type: ignore[no-untyped-def]
    """`grid.exponent` of a float32 from the bits of its magnitude: smallest e >= -100 with |x| < 2^e."""
    # denormal numbers and zero have a biased exponent of 0, so they give the minimum
    return max((np.int64(bits) >> 23) - 126, MIN_EXPONENT)


@inline
def exponent64(bits):  # type: ignore[no-untyped-def]
    """`grid.exponent` of a float64 from the bits of its magnitude: smallest e >= -100 with |x| < 2^e."""
    return max((np.int64(bits) >> 52) - 1022, MIN_EXPONENT)


@inline
def magnitude_bits(x):  # type: ignore[no-untyped-def]
    """Bits of |x| of a float32."""
    return np.int32(np.float32(x).view(np.int32) & MAGNITUDE32)


@inline
def magnitude_bits_64(x):  # type: ignore[no-untyped-def]
    """Bits of |x| of a float64."""
    return np.int64(np.float64(x).view(np.int64) & MAGNITUDE64)


@inline
def ordered(bits):  # type: ignore[no-untyped-def]
    """Bits of a float32 as an integer that orders like the float, and back. Maxima of integers vectorise."""
    return np.int32(bits ^ np.int32(np.int32(bits >> 31) & MAGNITUDE32))


@inline
def round_to_f32_plus_zero(x):  # type: ignore[no-untyped-def]
    """fl32(x) + 0: one rounding of a float64, and never a negative zero."""
    return np.float32(x) + _ZERO
