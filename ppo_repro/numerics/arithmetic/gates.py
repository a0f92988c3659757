"""The gates g of Gaussian error linear units, y = x g(x), and their derivatives.

Computed in float64 by the elementwise law. Hendrycks and Gimpel, 2016.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ppo_repro.numerics.arithmetic.elementwise import exp64

Gate = Callable[[Tensor], tuple[Tensor, Tensor]]  # float64 x -> g(x) and g'(x)

# arguments are clamped to this: beyond it every gate rounds to 0 or 1 in float32
LIMIT = 512.0
LAST_TAIL = 37.0  # |x| is clamped to this in the normal distribution
DENSITY_AT_0 = 1.0 / math.sqrt(2.0 * math.pi)
SQRT_2_OVER_PI = 0.7978845608028654
CUBIC = 0.044715
TANH_SLOPE = 2.0 * SQRT_2_OVER_PI
QUICK_SLOPE = 1.702
# (a + 4) M(a) as a polynomial in (a - 4) / (a + 4), highest power first, with Mills' ratio
# M(a) = (1 - Phi(a)) / phi(a); Chebyshev interpolation on 0 <= a <= 37, relative error below 5e-13
MILLS_COEFFICIENTS = (
    4.998202230545274e-07,
    1.7269315132613787e-06,
    -1.7648377295435408e-06,
    -1.4051428564123198e-05,
    2.194249382487404e-06,
    8.770534464948137e-05,
    -5.053964627236879e-06,
    -0.0005791662431488294,
    0.0003343366576061205,
    0.004087842353365089,
    -0.008722311656339323,
    -0.018900450297099348,
    0.15139176372364502,
    -0.46754096297936204,
    0.9704095548214695,
    -1.5237709108209903,
    1.8932190633087331,
)


def normal_cdf(x: Tensor) -> tuple[Tensor, Tensor]:
    """Phi(x) = (1 + erf(x / sqrt 2)) / 2 and its derivative phi(x), float64, relative error below 1e-12.

    Phi(-a) = phi(a) M(a) for a >= 0, which keeps the tail's relative accuracy. |x| is clamped to 37, Phi(-37) = 6e-300.
    """
    a = x.abs().clamp(max=LAST_TAIL)
    density = exp64(a * a * -0.5) * DENSITY_AT_0
    s = (a - 4.0) / (a + 4.0)
    y = torch.full_like(s, MILLS_COEFFICIENTS[0])
    for c in MILLS_COEFFICIENTS[1:]:
        y = y.mul_(s).add_(c)
    tail = density * (y / (a + 4.0))
    return torch.where(x < 0, tail, 1.0 - tail), density


def _logistic(u: Tensor) -> tuple[Tensor, Tensor]:
    """s = 1 / (1 + exp(-u)) and s (1 - s), each with small relative error even where it is tiny."""
    e = exp64(-u)
    s = 1.0 / (e + 1.0)
    return s, e * s * s


def tanh_gate(x: Tensor) -> tuple[Tensor, Tensor]:
    """(1 + tanh u) / 2 = logistic(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3), and its derivative."""
    square = x * x
    s, slope = _logistic((x * square * CUBIC + x) * TANH_SLOPE)
    return s, slope * ((square * (3.0 * CUBIC) + 1.0) * TANH_SLOPE)


def quick_gate(x: Tensor) -> tuple[Tensor, Tensor]:
    """logistic(1.702 x) and its derivative."""
    s, slope = _logistic(x * QUICK_SLOPE)
    return s, slope * QUICK_SLOPE
