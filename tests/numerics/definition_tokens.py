"""Rows of logits and float64 elementary functions, written out slowly in NumPy; it shares no line with the kernels.

z float32 [n, V]; eligible bool [n, V] or None; float32 where nothing else is said.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np

from tests.numerics.definition import row_sum
from tests.numerics.definition_elementary import (
    LOG2_E,
    ROUND64,
    Array,
    D,
    F,
    exp32,
    fma,
    polynomial64,
    quiet,
    sin_cos64,
)
from tests.support.sampler import MASK, murmur3

LN2_HIGH64, LN2_LOW64 = 6.93147180369123816490e-01, 1.90821492927058770002e-10

# ------------------------------------------------------------------------------------------ elementary functions


@quiet
def log64(x: Array) -> Array:
    """Positive normal x = (1 + f) 2^e with sqrt(1/2) <= 1 + f < sqrt(2); s = f / (2 + f), a polynomial in s^2."""
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
    """ln of 1 + x, and what was rounded away in 1 + x."""
    total = 1.0 + x
    return log64(total) + (x - (total - 1.0)) / total


def exp64(x: Array) -> Array:
    """x = n ln 2 + r, Taylor's polynomial of degree 13 in r, times 2^n."""
    x = np.clip(np.asarray(x, D), -708.0, 709.0)
    n = (x * LOG2_E + ROUND64) - ROUND64
    r = (x - n * LN2_HIGH64) - n * LN2_LOW64
    y = polynomial64(r, *(1.0 / math.factorial(k) for k in range(13, 1, -1)))
    return (y * (r * r) + r + 1.0) * ((n.astype(np.int64) + 1023) << 52).view(D)


def sigmoid64(x: Array) -> Array:
    return 1.0 / (1.0 + exp64(-np.asarray(x, D)))


def softplus64(x: Array) -> Array:
    return np.where(x > 0, x, 0.0) + log1p64(exp64(-np.abs(x)))


# ------------------------------------------------------------------------------------------------- distributions


@dataclass(frozen=True)
class Softmax:
    """shifted and e = exp(shifted), 0 where not eligible, [n, V]; total, log_total and top [n, 1] float64."""

    shifted: Array
    e: Array
    total: Array
    log_total: Array
    top: Array


@quiet
def softmax(z: Array, temperature: float, eligible: Array | None) -> Softmax:
    """p = e / total."""
    scaled = z / F(temperature)
    top = (scaled if eligible is None else np.where(eligible, scaled, F(-np.inf))).max(-1, keepdims=True) + F(
        0
    )  # never -0
    shifted = scaled - top
    e = exp32(shifted) if eligible is None else np.where(eligible, exp32(shifted), F(0))
    total = row_sum(e)[:, None]
    return Softmax(shifted, e, total, log64(total), top.astype(D))


def log_p(s: Softmax) -> Array:
    return (s.shifted.astype(D) - s.log_total).astype(F)


def expectation(s: Softmax, values: Array) -> Array:
    """sum_v p_v values_v, float64 [n, 1]; values [n, V]."""
    return row_sum(s.e.astype(D) * values)[:, None] / s.total


def statistics(z: Array, targets: Array, temperature: float, eligible: Array | None) -> tuple[Array, Array, Array]:
    """(log p of the targets, entropies, sums of p^2), [n] each."""
    s = softmax(z, temperature, eligible)
    entropy = s.log_total - expectation(s, s.shifted.astype(D))
    squares = row_sum(s.e, s.e)[:, None] / (s.total * s.total)
    at_target = np.take_along_axis(log_p(s), targets[:, None], -1)
    return at_target[:, 0], entropy[:, 0].astype(F), squares[:, 0].astype(F)


@quiet
def statistics_gradient(
    z: Array, targets: Array, temperature: float, eligible: Array | None, d_logprob: Array, d_entropy: Array
) -> Array:
    """([v = target] d_logprob - p_v (d_logprob + d_entropy (shifted_v - mean))) / temperature, [n, V].

    +0 in rows whose d_logprob and d_entropy are zeros of any sign.
    """
    s = softmax(z, temperature, eligible)
    mean = expectation(s, s.shifted.astype(D)).astype(F)
    p = s.e * (1.0 / s.total).astype(F)
    away = p * fma(np.broadcast_to(d_entropy[:, None], z.shape), s.shifted - mean, d_logprob[:, None])
    if eligible is not None:
        away = np.where(eligible, away, F(0))
    chosen = np.arange(z.shape[1]) == targets[:, None]
    gradient = (np.where(chosen, d_logprob[:, None], F(0)) - away) / F(temperature)
    return np.where(((d_logprob != 0) | (d_entropy != 0))[:, None], gradient, F(0))


def divergence(p_logits: Array, q_logits: Array, temperature: float, eligible: Array | None) -> Array:
    """KL(p || q) = sum_v p_v (shifted_p - shifted_q) + log_total_q - log_total_p, [n]."""
    p, q = softmax(p_logits, temperature, eligible), softmax(q_logits, temperature, eligible)
    mean = expectation(p, p.shifted.astype(D) - q.shifted.astype(D))
    return (mean + (q.log_total - p.log_total))[:, 0].astype(F)


def divergence_gradient(
    p_logits: Array, q_logits: Array, temperature: float, eligible: Array | None, seed: Array
) -> Array:
    """seed p_v ((shifted_p - shifted_q) - mean) / temperature, [n, V]; +0 where not eligible."""
    p, q = softmax(p_logits, temperature, eligible), softmax(q_logits, temperature, eligible)
    difference = p.shifted.astype(D) - q.shifted.astype(D)
    away = (difference - expectation(p, difference)).astype(F)
    gradient = seed[:, None] * ((p.e * (1.0 / p.total).astype(F)) * away) / F(temperature)
    return gradient if eligible is None else np.where(eligible, gradient, F(0))


# ------------------------------------------------------------------------------------------- noise and sampling


def hashes(seed: int, position: int, columns: Array, *first: int) -> Array:
    """MurmurHash3 of the first words, the seed as uint64, position and column as uint32, little endian; float64."""
    words = struct.pack(f"<{len(first)}IQI", *first, seed % 2**64, position % 2**32)
    return np.array([murmur3(words + struct.pack("<I", column)) for column in columns], D)


def gumbel_of(h: Array) -> Array:
    """-ln(-ln(h / (2^32 - 1))) with ln in [-DBL_MAX, -2^-32]; float64."""
    log_u = np.where(h > 0, log64(np.maximum(h, 1.0) / MASK), -np.finfo(D).max)
    return -log64(-np.minimum(log_u, -(2.0**-32)))


def gumbel_noise(seed: int, position: int, columns: Array) -> Array:
    return gumbel_of(hashes(seed, position, columns))


def normal_noise(seed: int, position: int, columns: Array) -> Array:
    """sqrt(-2 ln u) cos(2 pi v), u and v = (h + 1/2) / 2^32 of hashes whose first words are 1 and 2; float64."""
    u, v = ((hashes(seed, position, columns, first) + 0.5) * 2.0**-32 for first in (1, 2))
    return np.sqrt(log64(u) * -2.0) * sin_cos64(v * (2.0 * math.pi))[1]


def cut(scaled: Array, top_k: int, top_p: float) -> tuple[Array, Array, Array]:
    """(eligible, rank, log kept mass) of one row [V]: added one by one by rank, ties by id."""
    order = sorted(range(len(scaled)), key=lambda v: (-scaled[v], v))
    e = exp32(scaled - scaled[order[0]]).astype(D)
    total = D(0)
    for v in order:
        total = total + e[v]
    eligible, rank, before = np.zeros(len(scaled), bool), np.empty(len(scaled), np.int32), D(0)
    for i, v in enumerate(order):
        rank[v] = i
        if (not top_k or i < top_k) and before <= top_p * total:
            eligible[v] = True
            before = before + e[v]
    return eligible, rank, log64(np.array([before / total]))[0].astype(F)


def sample(z: Array, seed: int, position: int, temperature: float, kept: tuple[Array, Array] | None) -> tuple[int, F]:
    """The first v with the largest log p_v + noise of one row [V], and log p_v; kept: (eligible, column), [V] each."""
    row = log_p(softmax(z[None], temperature, None))[0]
    eligible, columns = (None, np.arange(len(z))) if kept is None else kept
    scores = row.astype(D) + gumbel_noise(seed, position, columns)
    token = int((scores if eligible is None else np.where(eligible, scores, -np.inf)).argmax())
    return token, row[token]
