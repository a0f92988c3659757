"""Elementary functions inside kernels, operation by operation those of `arithmetic.elementwise` and `grid`.

Only + - *, `div_rn`, `sqrt_rn`, casts and bit operations: of float32 Triton's `/`, `sqrt`, `exp` and `log` are
approximations on a card; of float64 `/` and `sqrt` are IEEE. Rounding to an integer is an addition of a large
number, which every device rounds alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ppo_repro.numerics.arithmetic import elementwise, gates, grid
from ppo_repro.numerics.arithmetic.distribution import PART_BITS, PART_MASK

ROUND32: tl.constexpr = tl.constexpr(1.5 * 2.0**23)  # x + this is a multiple of 1, for |x| < 2^22
ROUND32_BITS: tl.constexpr = tl.constexpr(0x4B400000)
ROUND64: tl.constexpr = tl.constexpr(1.5 * 2.0**52)  # for |x| < 2^51
ROUND64_BITS: tl.constexpr = tl.constexpr(0x4338000000000000)
TWO52: tl.constexpr = tl.constexpr(2.0**52)
MIN_EXPONENT: tl.constexpr = tl.constexpr(grid.MIN_EXPONENT)
NOT_FINITE: tl.constexpr = tl.constexpr(129)  # the exponent of infinity and NaN of float32
NOT_FINITE64: tl.constexpr = tl.constexpr(1025)
LOG2_E: tl.constexpr = tl.constexpr(elementwise.LOG2_E)
LN2: tl.constexpr = tl.constexpr(elementwise.LN2)
LN2_HIGH: tl.constexpr = tl.constexpr(elementwise.LN2_HIGH)
LN2_LOW: tl.constexpr = tl.constexpr(elementwise.LN2_LOW)
EXP_MIN: tl.constexpr = tl.constexpr(elementwise.EXP_MIN)
EXP_MAX: tl.constexpr = tl.constexpr(elementwise.EXP_MAX)
EXP: tl.constexpr = tl.constexpr(elementwise.EXP_COEFFICIENTS)
EXP64: tl.constexpr = tl.constexpr(elementwise.EXP64_COEFFICIENTS)
EXP64_MIN: tl.constexpr = tl.constexpr(elementwise.EXP64_MIN)
EXP64_MAX: tl.constexpr = tl.constexpr(elementwise.EXP64_MAX)
EXP64_LN2_HIGH: tl.constexpr = tl.constexpr(elementwise.EXP64_LN2_HIGH)
EXP64_LN2_LOW: tl.constexpr = tl.constexpr(elementwise.EXP64_LN2_LOW)
ARTANH: tl.constexpr = tl.constexpr(tuple(1.0 / (2 * k + 1) for k in range(11, -1, -1)))
HALF_ROOT: tl.constexpr = tl.constexpr(0.7071067811865476)
LAST_TAIL: tl.constexpr = tl.constexpr(gates.LAST_TAIL)
DENSITY_AT_0: tl.constexpr = tl.constexpr(gates.DENSITY_AT_0)
MILLS: tl.constexpr = tl.constexpr(gates.MILLS_COEFFICIENTS)
TANH_SLOPE: tl.constexpr = tl.constexpr(gates.TANH_SLOPE)
CUBIC: tl.constexpr = tl.constexpr(gates.CUBIC)
CUBIC_3: tl.constexpr = tl.constexpr(3.0 * gates.CUBIC)
QUICK_SLOPE: tl.constexpr = tl.constexpr(gates.QUICK_SLOPE)
PARTS: tl.constexpr = tl.constexpr(PART_BITS)
PARTS_MASK: tl.constexpr = tl.constexpr(PART_MASK)


@triton.jit
def pow2(exponent):
    """2^exponent as float64, of an integer in [-1022, 1023]."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def rint64(x):
    """x rounded to the nearest integer, ties to even, as float64."""
    magnitude = tl.where(x < 0.0, -x, x)
    whole = (magnitude + TWO52) - TWO52
    return tl.where(magnitude < TWO52, tl.where(x < 0.0, -whole, whole), x)


@triton.jit
def to_int64(x):
    """The nearest integer, ties to even, of |x| < 2^51 in float64."""
    return (x + ROUND64).to(tl.int64, bitcast=True) - ROUND64_BITS


@triton.jit
def magnitude_bits(x):
    """The bits of |x| as an integer, which has the order of the magnitudes; NaN above infinity above all numbers."""
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def exponent_of_bits(bits):
    """`grid.exponent` of a magnitude by its bits; NOT_FINITE, of float64 NOT_FINITE64, for infinity and NaN."""
    if bits.dtype == tl.int64:
        e = ((bits >> 52) - 1022).to(tl.int32)
    else:
        e = (bits >> 23) - 126
    return tl.where(e < MIN_EXPONENT, MIN_EXPONENT, e)


@triton.jit
def exp(x):
    """`elementwise.exp`."""
    x = tl.where(x < EXP_MIN, EXP_MIN, x)
    x = tl.where(x > EXP_MAX, EXP_MAX, x)
    moved = x * LOG2_E + ROUND32
    k = moved - ROUND32
    r = x - k * LN2_HIGH
    r = r - k * LN2_LOW
    y = r * EXP[0]
    for i in tl.static_range(1, 6):
        y = (y + EXP[i]) * r
    y = y * r + r + 1.0
    power = moved.to(tl.int32, bitcast=True) - ROUND32_BITS
    return y * ((power + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exp64(x):
    """`elementwise.exp64`."""
    x = tl.where(x < EXP64_MIN, EXP64_MIN, x)
    x = tl.where(x > EXP64_MAX, EXP64_MAX, x)
    moved = x * LOG2_E + ROUND64
    k = moved - ROUND64
    r = x - k * EXP64_LN2_HIGH
    r = r - k * EXP64_LN2_LOW
    y = tl.full(r.shape, EXP64[0], tl.float64)
    for i in tl.static_range(1, 15):
        y = y * r + EXP64[i]
    return y * pow2(moved.to(tl.int64, bitcast=True) - ROUND64_BITS)


@triton.jit
def log(x):
    """`elementwise.log` of a normal positive float64."""
    bits = x.to(tl.int64, bitcast=True)
    e = ((bits >> 52) - 1022).to(tl.float64)
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    low = mantissa < HALF_ROOT
    mantissa = tl.where(low, mantissa * 2.0, mantissa)
    e = tl.where(low, e - 1.0, e)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    y = z * ARTANH[0] + ARTANH[1]
    for i in tl.static_range(2, 12):
        y = y * z + ARTANH[i]
    return e * LN2 + (s * 2.0) * y


@triton.jit
def round_limbs(above, below, BITS: tl.constexpr):
    """`grid.round_limbs`."""
    above = above + (below >> BITS)
    fine = ((above & 0xFF) << BITS) + (below - ((below >> BITS) << BITS))
    return (above >> 8).to(tl.float64) * (2.0 ** (8 + BITS)) + fine.to(tl.float64)


@triton.jit
def normal_cdf(x):
    """`gates.normal_cdf`."""
    a = tl.where(x < 0.0, -x, x)
    a = tl.where(a > LAST_TAIL, LAST_TAIL, a)
    density = exp64(a * a * -0.5) * DENSITY_AT_0
    s = (a - 4.0) / (a + 4.0)
    y = tl.full(s.shape, MILLS[0], tl.float64)
    for i in tl.static_range(1, 17):
        y = y * s + MILLS[i]
    tail = density * (y / (a + 4.0))
    return tl.where(x < 0.0, tail, 1.0 - tail), density


@triton.jit
def logistic(u):
    """`gates._logistic`."""
    e = exp64(-u)
    one = tl.full(u.shape, 1.0, tl.float64)
    s = one / (e + 1.0)
    return s, e * s * s


@triton.jit
def tanh_gate(x):
    """`gates.tanh_gate`."""
    square = x * x
    s, slope = logistic((x * square * CUBIC + x) * TANH_SLOPE)
    return s, slope * ((square * CUBIC_3 + 1.0) * TANH_SLOPE)


@triton.jit
def quick_gate(x):
    """`gates.quick_gate`."""
    s, slope = logistic(x * QUICK_SLOPE)
    return s, slope * QUICK_SLOPE
