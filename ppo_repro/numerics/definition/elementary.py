"""Compute rule 5 elementwise: fma and the elementary functions, each written as the list of its operations.

Every operation of NumPy below (+, -, x, /, sqrt) rounds once, as in C. A function's name ends in the width of its
numbers.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

F, D = np.float32, np.float64

Array = np.ndarray

ROUND32, ROUND64 = F(1.5 * 2.0**23), D(1.5 * 2.0**52)  # x + ROUND - ROUND is x rounded to an integer

LOG2_E = 1.4426950408889634

LN2_HIGH32, LN2_LOW32 = F(0.693359375), F(-2.12194440e-4)

LN2_HIGH64, LN2_LOW64 = 6.93147180369123816490e-01, 1.90821492927058770002e-10

SIGNS = (-1, 1, -1, 1, -1, 1, -1)

quiet = np.errstate(all="ignore")  # infinities and NaNs are results


@quiet
def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> Array:
    """Compute a b + c, rounded once to float32. Kernel: `fma32`.

    The product is exact in float64. The sum is rounded to odd there, so 53 >= 2 x 24 + 2 bits round to the right 24.
    """
    product = np.asarray(a, F).astype(D) * np.asarray(b, F).astype(D)
    addend = np.asarray(c, F).astype(D)
    total = np.asarray(product + addend)
    from_addend = total - product
    error = (product - (total - from_addend)) + (addend - from_addend)
    bits = total.view(np.int64)
    inexact_and_even = ((error > 0) | (error < 0)) & (bits & 1 == 0)
    towards_odd = np.where((error > 0) == (total > 0), 1, -1)
    return (bits + inexact_and_even * towards_odd).view(D).astype(F)


def polynomial(x: Array, first: float, *rest: float) -> Array:
    """Evaluate a polynomial by y = first, then y = fma(y, x, coefficient) for each further coefficient; float32."""
    y = np.full_like(x, F(first))
    for coefficient in rest:
        y = fma(y, x, F(coefficient))
    return y


def polynomial64(x: Array, first: float, *rest: float) -> Array:
    """Evaluate a polynomial by y = first, then y = y x + coefficient; product and sum each round to float64."""
    y = np.full_like(x, first)
    for coefficient in rest:
        y = y * x + coefficient
    return y


def power_of_two(exponent: Array) -> Array:
    """Return 2^exponent for int32 exponents in float32's normal range."""
    return ((exponent + 127).astype(np.uint32) << np.uint32(23)).view(F)


def with_sign(size: Array, x: Array) -> Array:
    """Return size >= 0 with the sign of x."""
    return np.copysign(size, x)


@quiet
def exp32(x: Array) -> Array:
    """Compute exp(x): with x = n ln 2 + r, a polynomial in r, times 2^n in two factors. Kernel: `exp32`."""
    x = np.asarray(x, F)
    x = np.where(x < F(-105), F(-105), x)
    x = np.where(x > F(89.5), F(89.5), x)
    shifted = fma(x, F(LOG2_E), ROUND32)
    n = shifted - ROUND32
    r = fma(n, -LN2_LOW32, fma(n, -LN2_HIGH32, x))
    y = polynomial(
        r, 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1
    )
    y = fma(y, r * r, r) + F(1)
    whole = n.astype(np.int32)
    half = whole >> 1
    return y * power_of_two(half) * power_of_two(whole - half)


@quiet
def sigmoid32(x: Array) -> Array:
    """Compute sigmoid(x) = 1 / (1 + exp(-x)). Kernel: `sigmoid32`."""
    return F(1) / (F(1) + exp32(-np.asarray(x, F)))


@quiet
def tanh32(x: Array) -> Array:
    """Compute tanh(x): an odd polynomial below 0.625, else 1 - 2 / (exp(2 |x|) + 1) with the sign of x.

    Kernel: `tanh32`.
    """
    x = np.asarray(x, F)
    size, z = np.abs(x), x * x
    y = polynomial(z, -5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
    large = F(1) - F(2) / (exp32(F(2) * size) + F(1))
    return np.where(size < F(0.625), fma(y * z, x, x), with_sign(large, x))


@quiet
def erf32(x: Array) -> Array:
    """Compute erf(x): an odd polynomial below 1, else 1 - exp(-q(|x|)) with the sign of x. Kernel: `erf32`."""
    x = np.asarray(x, F)
    size, z = np.abs(x), x * x
    y = polynomial(
        z,
        7.853861353153693e-5,
        -8.010193625184903e-4,
        5.188327685732524e-3,
        -2.685381193529856e-2,
        1.128358514861418e-1,
        -3.761262582423300e-1,
        1.28379165726710e-1,
    )
    q = polynomial(
        np.where(size > F(4), F(4), size),
        -1.86379095736e-4,
        2.94765740237e-3,
        -2.18380605712e-2,
        1.03106747723e-1,
        6.38144840332e-1,
        1.12708918582,
        3.41524044237e-4,
    )
    return np.where(size < F(1), fma(y, x, x), with_sign(F(1) - exp32(-q), x))


def exp64(x: Array) -> Array:
    """Compute exp(x): with x = n ln 2 + r, Taylor's polynomial of degree 13 in r, times 2^n. Kernel: `exp64`."""
    x = np.clip(np.asarray(x, D), -708.0, 709.0)
    n = (x * LOG2_E + ROUND64) - ROUND64
    r = (x - n * LN2_HIGH64) - n * LN2_LOW64
    y = polynomial64(r, *(1.0 / math.factorial(k) for k in range(13, 1, -1)))
    return (y * (r * r) + r + 1.0) * ((n.astype(np.int64) + 1023) << 52).view(D)


@quiet
def log64(x: Array) -> Array:
    """Compute ln(x) of positive normal x = (1 + f) 2^e, sqrt(1/2) <= 1 + f < sqrt(2): a polynomial in (f / (2 + f))^2.

    Kernel: `log64`.
    """
    bits = np.asarray(x, D).view(np.uint64) + np.uint64(0x3FF0000000000000 - 0x3FE6A09E00000000)
    e = (bits >> np.uint64(52)).astype(D) - 1023.0
    f = ((bits & np.uint64(2**52 - 1)) + np.uint64(0x3FE6A09E00000000)).view(D) - 1.0
    half, s = 0.5 * f * f, f / (2.0 + f)
    z = s * s
    y = polynomial64(
        z,
        1.479819860511658591e-01,
        1.531383769920937332e-01,
        1.818357216161805012e-01,
        2.222219843214978396e-01,
        2.857142874366239149e-01,
        3.999999999940941908e-01,
        6.666666666666735130e-01,
    )
    return e * LN2_HIGH64 - ((half - (s * (half + y * z) + e * LN2_LOW64)) - f)


def log1p64(x: Array) -> Array:
    """Compute ln(1 + x) = ln(s) + (1 + x - s) / s with the rounded sum s = 1 + x. Kernel: `log1p64`."""
    total = 1.0 + x
    return log64(total) + (x - (total - 1.0)) / total


def sigmoid64(x: Array) -> Array:
    """Compute sigmoid(x) = 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + exp64(-np.asarray(x, D)))


def softplus64(x: Array) -> Array:
    """Compute softplus(x) = max(x, 0) + ln(1 + exp(-|x|))."""
    return np.where(x > 0, x, 0.0) + log1p64(exp64(-np.abs(x)))


def sin_cos64(x: Array) -> tuple[Array, Array]:
    """Compute sine and cosine of 0 <= x < 2^20: with x = n pi/2 + r, polynomials in r; n chooses polynomial and sign.

    Kernel: `sin_cos64`.
    """
    x = np.asarray(x, D)
    n = (x * 6.36619772367581382433e-01 + ROUND64) - ROUND64
    r = ((x - n * 1.57079632673412561417) - n * 6.07710050630396597660e-11) - n * 2.02226624879595063154e-21
    z = r * r
    s = polynomial64(z, *(sign / math.factorial(k) for k, sign in zip(range(15, 1, -2), SIGNS, strict=True)))
    s = s * z * r + r
    c = polynomial64(z, *(-sign / math.factorial(k) for k, sign in zip(range(16, 2, -2), SIGNS, strict=True)))
    c = c * (z * z) - 0.5 * z + 1.0
    quadrant = n.astype(np.int64)
    odd = quadrant % 2 == 1
    sine = np.where(quadrant // 2 % 2 == 1, -1, 1) * np.where(odd, c, s)
    cosine = np.where((quadrant + 1) // 2 % 2 == 1, -1, 1) * np.where(odd, s, c)
    return sine, cosine
