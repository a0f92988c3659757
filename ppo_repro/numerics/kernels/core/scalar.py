"""Scalar functions of the exact numerics, put into kernels where they are called.

They take the caller's floating-point flags with them: use `exp32` in a `kernel`, never in an `exact_sum`,
where its operations would be contracted into fused multiply-adds.
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
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
)
from ppo_repro.numerics.arithmetic.grid import MIN_EXPONENT
from ppo_repro.numerics.kernels.core.compile import inline

_LOG2_E = np.float32(LOG2_E)
_LN2_HIGH, _LN2_LOW = np.float32(LN2_HIGH), np.float32(LN2_LOW)
_MIN, _MAX = np.float32(EXP_MIN), np.float32(EXP_MAX)
_C0, _C1, _C2, _C3, _C4, _C5 = (np.float32(c) for c in EXP_COEFFICIENTS)
_D14, _D13, _D12, _D11, _D10, _D9, _D8, _D7, _D6, _D5, _D4, _D3, _D2, _D1, _D0 = EXP64_COEFFICIENTS
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)


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
    return y * np.int32((np.int32(k) + 127) << 23).view(np.float32)


@inline
def pow2_64(exponent):  # type: ignore[no-untyped-def]
    """2^exponent as float64, exactly; integer exponent in [-1022, 1023]."""
    return np.int64((np.int64(exponent) + 1023) << 52).view(np.float64)


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
    # by way of 32 bits: AVX2 cannot convert to 64
    return y * np.int64((np.int64(np.int32(k)) + 1023) << 52).view(np.float64)


@inline
def pow2_32(exponent):  # type: ignore[no-untyped-def]
    """2^exponent as float32, exactly; integer exponent in [-126, 127]."""
    return np.int32((np.int32(exponent) + 127) << 23).view(np.float32)


@inline
def exponent32(bits):  # type: ignore[no-untyped-def]
    """`grid.exponent` of the float32 whose bits without the sign are `bits`: max |x| < 2^e, at least -100."""
    # denormal numbers and zero have a biased exponent of 0 and come out below the minimum
    return max((np.int64(bits) >> 23) - 126, MIN_EXPONENT)


@inline
def exponent64(bits):  # type: ignore[no-untyped-def]
    """`grid.exponent` of the float64 whose bits without the sign are `bits`: max |x| < 2^e, at least -100."""
    return max((np.int64(bits) >> 52) - 1022, MIN_EXPONENT)


@inline
def round_to_f32_plus_zero(x):  # type: ignore[no-untyped-def]
    """fl32(x) + 0: one rounding of a float64, and never a negative zero."""
    return np.float32(x) + _ZERO
