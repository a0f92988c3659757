"""fma and the elementary functions of the law, written out in NumPy: the same operations in the same order as in C."""

from __future__ import annotations

import math

import numpy as np

F, D = np.float32, np.float64
Array = np.ndarray
ROUND32, ROUND64 = F(1.5 * 2.0**23), D(1.5 * 2.0**52)  # x + ROUND - ROUND is x rounded to an integer
LOG2_E = 1.4426950408889634
LN2_HIGH32, LN2_LOW32 = F(0.693359375), F(-2.12194440e-4)
SIGNS = (-1, 1, -1, 1, -1, 1, -1)

quiet = np.errstate(all="ignore")  # infinities and NaNs are results


@quiet
def fma(a: Array, b: Array, c: Array) -> Array:
    """a b + c, rounded once to float32.

    The product is exact in float64. The sum is rounded to odd there, and 53 >= 2 x 24 + 2 bits round to the right 24.
    """
    a, b, c = (np.asarray(v, F).astype(D) for v in (a, b, c))
    product = a * b
    total = np.asarray(product + c)
    of_c = total - product
    error = (product - (total - of_c)) + (c - of_c)
    bits = total.view(np.int64)
    inexact_and_even = ((error > 0) | (error < 0)) & (bits & 1 == 0)
    towards_odd = np.where((error > 0) == (total > 0), 1, -1)
    return (bits + inexact_and_even * towards_odd).view(D).astype(F)


def polynomial(x: Array, first: float, *rest: float) -> Array:
    """y = first, then y = fma(y, x, coefficient) for the others; float32."""
    y = np.full_like(x, F(first))
    for coefficient in rest:
        y = fma(y, x, F(coefficient))
    return y


def polynomial64(x: Array, first: float, *rest: float) -> Array:
    """y = first, then y = y x + coefficient for the others, product and sum rounded one by one; float64."""
    y = np.full_like(x, first)
    for coefficient in rest:
        y = y * x + coefficient
    return y


def power_of_two(exponent: Array) -> Array:
    """2^exponent of int32 exponents in float32's normal range."""
    return ((exponent + 127).astype(np.uint32) << np.uint32(23)).view(F)


def with_sign(size: Array, x: Array) -> Array:
    """size >= 0 with the sign of x."""
    return np.copysign(size, x)


@quiet
def exp32(x: Array) -> Array:
    """x = n ln 2 + r, a polynomial in r, times 2^n in two factors."""
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
    """1 / (1 + exp(-x))."""
    return F(1) / (F(1) + exp32(-np.asarray(x, F)))


@quiet
def tanh32(x: Array) -> Array:
    """An odd polynomial below 0.625, else 1 - 2 / (exp(2 |x|) + 1) with the sign of x."""
    x = np.asarray(x, F)
    size, z = np.abs(x), x * x
    y = polynomial(z, -5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
    large = F(1) - F(2) / (exp32(F(2) * size) + F(1))
    return np.where(size < F(0.625), fma(y * z, x, x), with_sign(large, x))


@quiet
def erf32(x: Array) -> Array:
    """An odd polynomial below 1, else 1 - exp(-q(|x|)) with the sign of x."""
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


def sin_cos64(x: Array) -> tuple[Array, Array]:
    """Sine and cosine of 0 <= x < 2^20: x = n pi/2 + r, polynomials in r, chosen and signed by the quadrant n."""
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
