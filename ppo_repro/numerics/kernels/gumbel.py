"""Gumbel sampling as `rollout.sampler` defines it, computing logarithms only for the few tokens that can win.

A token's score is log p + g with Gumbel noise g = -ln(-ln u). Since -ln u >= 1 - u, g <= -ln(1 - u). And
log2 y >= (bits of y as float32) 2^-23 - 127: chords between powers of two lie below a concave function. So the hash
gives an upper bound of the score in a few vectorised operations, and only tokens whose bound reaches the best score
are computed exactly. The sampled tokens are those of the eager code.
"""

from __future__ import annotations

import numpy as np

from ppo_repro.numerics.arithmetic.distribution import MASS_UNIT
from ppo_repro.numerics.arithmetic.elementwise import LN2
from ppo_repro.numerics.kernels.core.compile import inline, kernel, kernel_part
from ppo_repro.numerics.kernels.core.pool import in_parts
from ppo_repro.numerics.kernels.core.scalar import log64
from ppo_repro.numerics.kernels.token_statistics import Array, extremes, top_and_reach, weigh

LARGEST_HASH = 0xFFFFFFFF
# Bounds are float32 sums. Every score that can win is above -12 - 710 (log p of the likeliest token, the smallest
# noise), where their roundings and that of u stay below 2e-4.
SLACK = np.float32(1e-3)
NS_PER_TOKEN = 3.5

_FLOAT64_MAX = float(np.finfo(np.float64).max)
_PER_UNIT = 1.0 / MASS_UNIT
_C1, _C2 = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)
_M5, _N = np.uint32(5), np.uint32(0xE6546B64)
_F1, _F2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_BYTES = np.uint32(16)  # hashed: four words
_NEVER = np.float32(-np.inf)
# -ln(y / 2^32) <= LN2 (127 + 32) - (bits of y) LN2 2^-23
_OFFSET, _SLOPE = np.float32(LN2 * (127 + 32)), np.float32(LN2 * 2.0**-23)


@inline
def rotate(x, bits):  # type: ignore[no-untyped-def]
    return np.uint32(np.uint32(x << np.uint32(bits)) | np.uint32(x >> np.uint32(32 - bits)))


@inline
def absorb(h, word):  # type: ignore[no-untyped-def]
    """One word of MurmurHash3 x86 32-bit."""
    k = np.uint32(np.uint32(word) * _C1)
    k = np.uint32(rotate(k, 15) * _C2)
    h = rotate(np.uint32(h ^ k), 13)
    return np.uint32(np.uint32(h * _M5) + _N)


@inline
def finish(h):  # type: ignore[no-untyped-def]
    """MurmurHash3's finalisation after four words."""
    h = np.uint32(h ^ _BYTES)
    h = np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(16))) * _F1)
    h = np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(13))) * _F2)
    return np.uint32(h ^ np.uint32(h >> np.uint32(16)))


@kernel_part
def noise_of_hash(h):  # type: ignore[no-untyped-def]
    """-ln(-ln(h / (2^32 - 1))) as `sampler.gumbel_noise` defines it; h uint32."""
    log_u = -_FLOAT64_MAX
    if h > 0:
        log_u = log64(np.float64(h) / np.float64(LARGEST_HASH))
    largest = -(2.0**-32)
    return -log64(-(log_u if log_u < largest else largest))


@kernel_part
def bound_of_hash(h):  # type: ignore[no-untyped-def]
    """An upper bound of `noise_of_hash`, up to a few roundings; float32."""
    y = np.float32(np.uint32(LARGEST_HASH) - h)
    return _OFFSET - np.float32(y.view(np.int32)) * _SLOPE


@kernel_part
def bounds(start, log_p, eligible, columns, out):  # type: ignore[no-untyped-def]
    """out_v >= log_p_v + noise_v of a row, -inf where not eligible; `start` is the hash of the first three words."""
    if columns.size:
        for v in range(out.size):
            bound = log_p[v] + bound_of_hash(finish(absorb(start, columns[v])))
            out[v] = bound if eligible[v] else _NEVER
    else:
        for v in range(out.size):
            out[v] = log_p[v] + bound_of_hash(finish(absorb(start, v)))


@kernel_part
def winner(start, log_p, columns, bound, highest):  # type: ignore[no-untyped-def]
    """The first token with the largest log_p_v + noise_v, given upper bounds and the highest of them."""
    probable = 0
    while bound[probable] != highest:
        probable += 1
    column = columns[probable] if columns.size else probable
    score = np.float64(log_p[probable]) + noise_of_hash(finish(absorb(start, column)))
    best, token, threshold = -np.inf, -1, np.float32(score) - SLACK
    for v in range(bound.size):
        if bound[v] >= threshold:
            column = columns[v] if columns.size else v
            score = np.float64(log_p[v]) + noise_of_hash(finish(absorb(start, column)))
            if score > best:
                best, token = score, v
    return token


@kernel
def _sample(first, last, logits, seeds, positions, temperature, eligible, columns, tokens, logprobs):  # type: ignore[no-untyped-def]
    shifted, weights = np.empty(logits.shape[1], np.float32), np.empty(logits.shape[1], np.float32)
    log_p, bound = np.empty(logits.shape[1], np.float32), np.empty(logits.shape[1], np.float32)
    all_eligible = np.empty(0, np.bool_)
    for i in range(first, last):
        top, _ = top_and_reach(logits[i], all_eligible, temperature)
        log_total = log64(weigh(logits[i], all_eligible, temperature, top, shifted, weights) * _PER_UNIT)
        for v in range(log_p.size):
            log_p[v] = np.float64(shifted[v]) - log_total
        start = absorb(np.uint32(0), seeds[i] & LARGEST_HASH)
        start = absorb(start, (seeds[i] >> 32) & LARGEST_HASH)
        start = absorb(start, positions[i] & LARGEST_HASH)
        bounds(start, log_p, eligible[i], columns[i], bound)
        tokens[i] = winner(start, log_p, columns[i], bound, extremes(bound, all_eligible)[1])
        logprobs[i] = log_p[tokens[i]]


def sample(
    logits: Array, seeds: Array, positions: Array, temperature: float, cut: tuple[Array, Array] | None
) -> tuple[Array, Array]:
    """Tokens int64 [n] and their log-probs in the full distribution float32 [n], for logits float32 [n, V].

    `cut` says which tokens are eligible, bool [n, V], and which column of the noise each takes, int64 [n, V]. Without
    it every token is eligible and takes its own column. Raises NumericsError if logits are not finite.
    """
    n, v = logits.shape
    tokens, logprobs = np.empty(n, np.int64), np.empty(n, np.float32)
    eligible, columns = cut or (np.empty((n, 0), np.bool_), np.empty((n, 0), np.int64))
    arguments = (logits, seeds, positions, np.float32(temperature), eligible, columns, tokens, logprobs)
    in_parts(lambda first, last: _sample(first, last, *arguments), n, NS_PER_TOKEN * v)
    return tokens, logprobs
